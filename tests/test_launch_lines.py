"""Every command line that conf/ can give is one that the pinned engine takes: its own parser reads it.

`make vllm-env` and `make sglang-env` make the engines' environments.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from composed import CONF, config
from test_sglang import STAND_INS
from test_vllm_server import SPEC

from eagle3.serving.lines import sglang_line
from extract.config import on_hardware
from extract.engines.sglang_command import sglang_command
from extract.engines.vllm import vllm_command

ROOT = Path(__file__).resolve().parents[1]
PARSERS = {
    "sglang": """
        import argparse
        from sglang.srt.server_args import ServerArgs
        parser = argparse.ArgumentParser(allow_abbrev=False)
        ServerArgs.add_cli_args(parser)
    """,
    "vllm": """
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        parser = make_arg_parser(FlexibleArgumentParser(allow_abbrev=False))
    """,
}
READ = """
import json, sys
for words in json.load(sys.stdin):
    print(json.dumps({k: v for k, v in vars(parser.parse_args(words)).items() if isinstance(v, (str, int, dict))}))
"""
DRAFTER = Path("/drafter")
NAMED = {"name": "n", "dtype": "bfloat16"}

pytestmark = pytest.mark.engine


def shipped(engine):
    """Server and hardware options whose engine this is, composed and typed."""
    servers = sorted(file.stem for file in (CONF / "server").glob("*.yaml"))
    for server in servers:
        for hardware in sorted(file.stem for file in (CONF / "hardware").glob("*.yaml")):
            checked = config(f"server={server}", f"hardware={hardware}", script="serve")
            if checked.server.engine == engine:
                yield server, hardware, on_hardware(checked.server, checked.hardware)


def parsed(engine, lines):
    """What the engine's parser makes of each; it exits at the first that it does not take."""
    python = ROOT / f".venv-{engine}" / "bin" / "python"
    assert python.exists(), f"{python} is missing: `make {engine}-env` makes it"
    code = "\n".join(line[8:] for line in PARSERS[engine].splitlines()) + READ
    env = os.environ | ({"PYTHONPATH": str(STAND_INS)} if engine == "sglang" else {})
    done = subprocess.run([python, "-c", code], input=json.dumps([line[3:] for line in lines]), env=env, check=False,
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_sglang_takes_every_line():
    lines, wanted = [], []
    for _, _, server in shipped("sglang"):
        for drafter in (None, DRAFTER):
            lines.append(sglang_line(Path("/py"), SPEC, server.flags, drafter, server.speculation, host="127.0.0.1",
                                     port=1, **NAMED))  # fmt: skip
            wanted.append(4 if drafter else None)
        for life in ("respond", "capture"):
            lines.append(sglang_command(Path("/py"), SPEC, server, life, port=1, version="0.5.23", **NAMED))
            wanted.append(None)
    found = parsed("sglang", lines)
    assert [one.get("speculative_num_draft_tokens") for one in found] == wanted and len(found) >= 4 * 2 * 4
    assert {one["attention_backend"] for one in found if "attention_backend" in one} >= {"triton", "torch_native"}
    assert 8 in {one["tp_size"] for one in found}


def test_vllm_takes_every_line():
    lines = [
        vllm_command(Path("/py"), SPEC, 1, server.flags, drafter=drafter, drafts=3 if drafter else None, **NAMED)
        for _, _, server in shipped("vllm")
        for drafter in (None, DRAFTER)
    ]
    found = parsed("vllm", lines)
    assert [one["speculative_config"]["num_speculative_tokens"] for one in found if "speculative_config" in one] == [
        3
    ] * (len(lines) // 2)
    assert 8 in {one["tensor_parallel_size"] for one in found}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_flag_that_the_engine_does_not_have_would_be_noticed(engine):
    with pytest.raises(AssertionError, match=r"unrecognized arguments: --num-warp-drives"):
        parsed(engine, [["python", "-m", "module", "--model", "m", "--num-warp-drives", "3"]])
