"""What is loaded inside SGLang's processes, as the package eagle3_capture of an entry point in `sglang.srt.plugins`.

Inert unless the variable EAGLE3_CAPTURE names a JSON file that says what to capture; see `extract.spool`, which writes
it. Imports the standard library and torch alone, and SGLang only where it must.
"""

import os

VARIABLE = "EAGLE3_CAPTURE"
LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"


def register() -> None:
    """The entry point: every SGLang process of whoever has this package installed calls it."""
    if VARIABLE not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from .install import after_load

    HookRegistry.register(LOAD_MODEL, after_load, HookType.AFTER)
