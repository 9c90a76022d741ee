"""Runs the real scripts as processes that are forked from one which has imported their libraries.

A start costs a fraction of a second this way instead of many. A run can be armed to die of SIGKILL at a named call:
`die=("extract.journal:Journal.append", 2, "before")`.
"""

import atexit
import errno
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
PRELOAD = [
    "scripts", "extract.job", "extract.report", "eagle3.app", "eagle3.charts", "eagle3.fit", "eagle3.outcome",
    "eagle3.sweep", "transformers.models.llama.modeling_llama", "wandb",
]  # fmt: skip

Death = tuple[str, int, str]
"""module:attribute, the how manieth call, and `before` or `after` it; or `ctrl-c` or `full disk`, instead of it."""

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(PRELOAD)


@dataclass(frozen=True)
class Done:
    """A script's end: exit code (negative: the signal that killed it) and all that it wrote."""

    code: int
    output: str

    def words(self) -> str:
        """The output without line breaks and table frames, for what a table may have folded."""
        return "".join(c for c in self.output if not c.isspace() and c not in "│╭╮╰╯─├┤┬┴┼")


class Script:
    """`python SCRIPT ARGUMENTS` in `cwd`, running."""

    def __init__(self, script: str, *arguments: str, cwd: Path, die: Death | None = None, stall_s: float = 0, **env):
        self.log = cwd / f"{script}-{time.monotonic_ns()}.out"
        self.log.touch()
        options = {"cwd": str(cwd), "log": str(self.log), "die": die, "stall_s": stall_s, "env": env}
        self.process: BaseProcess = FORKS.Process(target=_main, args=(script, list(arguments), options))
        self.process.start()

    def output(self) -> str:
        return self.log.read_text()

    def wait(self, timeout_s: float = 180) -> Done:
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            self.kill()
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output()}")
        return Done(self.process.exitcode, self.output())

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def run(script: str, *arguments: str, cwd: Path, die: Death | None = None, **env: str) -> Done:
    """Runs a script to its end, whatever that is."""
    return Script(script, *arguments, cwd=cwd, die=die, **env).wait()


def succeed(script: str, *arguments: str, cwd: Path, **env: str) -> Done:
    done = run(script, *arguments, cwd=cwd, **env)
    assert done.code == 0, done.output
    return done


def killed(script: str, *arguments: str, cwd: Path, die: Death) -> Done:
    done = run(script, *arguments, cwd=cwd, die=die)
    assert done.code == -signal.SIGKILL, f"exit code {done.code}, was to die {die}\n{done.output}"
    return done


def _main(script: str, arguments: list[str], options: dict[str, Any]) -> None:
    log = os.open(options["log"], os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"OMP_NUM_THREADS": "1", "WANDB_SILENT": "true"} | options["env"]
    torch.set_num_threads(1)
    os.chdir(options["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C, and we with it
    sys.argv = [str(ROOT / script), *arguments]
    sys.path[0] = str(ROOT)
    if options["die"]:
        _arm(*options["die"])
    if options["stall_s"]:
        _stall(options["stall_s"])
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which multiprocessing would leave out


def _arm(target: str, number: int, when: str) -> None:
    """The process kills itself at a certain call, so the moment is exact and the end as sudden as kill -9."""
    owner, name, original = _find(target)
    calls = 0

    def deadly(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if calls == number and when == "ctrl-c":
            raise KeyboardInterrupt
        if calls == number and when == "full disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        result = original(*arguments, **keywords)
        if calls == number and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


def _stall(seconds: float) -> None:
    owner, name, original = _find("extract.engines.inprocess:InProcessEngine.generate")

    def slow(*arguments: Any, **keywords: Any) -> Any:
        time.sleep(seconds)
        return original(*arguments, **keywords)

    setattr(owner, name, slow)


def _find(target: str) -> tuple[Any, str, Any]:
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name, getattr(owner, name)
