"""Real SGLang on a CPU, stock, hands over the very states of the in-process engine. `make sglang-env` makes its
environment."""

import json
import re
from pathlib import Path

import pytest
import torch
from composed import config
from packaging.version import Version
from scripts import Script
from tiny import tiny_verifier
from tiny_job import SETTINGS, settings, write_prompts

from extract import spool
from extract.engines import InProcessEngine, sglang_command
from extract.engines.base import EngineGone
from extract.engines.servers import OwnServers
from extract.engines.sglang import SglangEngine
from extract.engines.sglang_command import installed_sglang
from extract.store import open_store
from extract.verifier import resolve_verifier

ROOT = Path(__file__).resolve().parents[1]
PYTHON, STAND_INS = ROOT / ".venv-sglang" / "bin" / "python", ROOT / "tests" / "sglang_cpu"
SERVER = ("server=sglang_cpu", f"server.python={PYTHON}", f"server.env.PYTHONPATH={STAND_INS}")
CHUNK = 64
LAYERS = (1, 3, 6)

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def environment():
    assert PYTHON.exists(), f"{PYTHON} is missing: `make sglang-env` makes it"


def spec_of(path):
    return resolve_verifier(str(path), name="tiny", cache_dir=path.parent, chat_template=None, trust_remote_code=False)


def sglang_of(path, *overrides):
    server = config(*SERVER, f"server.flags.chunked_prefill_size={CHUNK}", *overrides, script="extract").server
    spec = spec_of(path)
    servers = OwnServers("own", spec, server, version=installed_sglang(server)[1], capture_layers=LAYERS,
                         dtype="float32", env={}, log_dir=path.parent / "log")  # fmt: skip
    return SglangEngine(spec, servers, capture_layers=LAYERS, dtype=torch.float32)


@pytest.fixture(scope="module", params=["llama", "qwen3", "llama by --forward-hooks"])
def pair(request, tmp_path_factory):
    """SGLang, and the reference, with the same verifier."""
    family, _, hooks = request.param.partition(" by ")
    path = tiny_verifier(tmp_path_factory.mktemp(family) / "v", family=family)
    reference = InProcessEngine(spec_of(path), capture_layers=LAYERS, dtype=torch.float32, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        if hooks:  # as for a version that knows no plugins
            patch.setattr(sglang_command, "PLUGINS_SINCE", Version("1"))
        engine = sglang_of(path, *(["server.env.SGLANG_PLUGINS=none"] if hooks else []))
        engine.capture([[3, 4, 5]])
    yield engine, reference
    folder = engine.servers.now()[1].folder
    engine.close()
    assert not folder.exists()


def prompts_of(lengths, *, prefix=()):
    generator = torch.Generator().manual_seed(0)
    return [[*prefix, *torch.randint(3, 320, (n,), generator=generator).tolist()] for n in lengths]


CASES = {
    "three prompts": prompts_of([10, 20, 30]),
    "one prompt that is cut in three": prompts_of([2 * CHUNK + 32]),
    "25 lengths": prompts_of([*range(1, 21), 33, 47, 65, 128, 200]),
    "a long shared prefix": prompts_of([3, 7, 7, 12], prefix=prompts_of([100])[0]),
}


def assert_equal(states, wanted):
    for ours, theirs in zip(states, wanted, strict=True):
        torch.testing.assert_close(ours.aux, theirs.aux, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.last, theirs.last, rtol=1e-4, atol=1e-4)


def test_the_states_are_those_of_the_reference_engine(pair, monkeypatch):
    engine, reference = pair
    parts = []
    read = spool._read
    monkeypatch.setattr(spool, "_read", lambda file, *rest: (parts.append(file.name), read(file, *rest))[1])
    for name, prompts in CASES.items():
        parts.clear()
        assert_equal(engine.capture(prompts), reference.capture(prompts))
        if name == "one prompt that is cut in three":
            assert [part.split(".")[1] for part in parts] == ["0", str(CHUNK), str(2 * CHUNK)]
    log = (engine.servers.log_dir / "capture" / "server.log").read_text()
    together = max(int(count) for count in re.findall(r"Prefill batch, #new-seq: (\d+)", log))
    assert together >= 3, "no prefill held three prompts"
    assert "#cached-token: 0" in log and not re.search(r"#cached-token: [1-9]", log)
    assert not list(engine.servers.now()[1].parts.iterdir()), "something was left in memory"


def test_it_is_the_installed_version_and_its_scheduler_that_speak(pair):
    engine, _ = pair
    engine.capture(CASES["three prompts"])
    server, spooled = engine.servers.now()
    assert server.info["version"] == engine.version == "0.5.23"
    (ready,) = spooled.ready()
    assert ready["layers"] == list(LAYERS) and ready["writes"] and ready["dtype"] == "float32"
    assert b"scheduler" in Path(f"/proc/{ready['pid']}/cmdline").read_bytes()


def test_probes_before_the_bulk_and_after_it_leave_figures(pair):
    engine, reference = pair
    prompts = CASES["25 lengths"][-4:]
    figures = engine.recheck(list(zip(prompts, reference.capture(prompts), strict=True)), torch.float32)
    for name in ("start", "stored"):
        assert figures[name]["states_max_difference"] < 1e-4 and figures[name]["logprob_mean_difference"] < 1e-4
        assert figures[name]["top1_agreement"] > 0.99
    assert figures["stored"]["sequences"] == 4 and figures["restarts"] == 0


def test_without_the_hook_nothing_is_captured_and_that_is_told(tmp_path):
    engine = sglang_of(tiny_verifier(tmp_path / "v"), "server.env.SGLANG_PLUGINS=none")
    with pytest.raises(EngineGone, match=r"0 of 1 ranks are ready to capture.*has not loaded the plugin"):
        engine.capture(CASES["three prompts"])
    engine.close()


def test_extract_py_answers_and_captures_with_two_servers_and_one_command(tmp_path):
    tiny_verifier(tmp_path / "v", hidden=64)
    write_prompts(tmp_path / "p.jsonl", [["What is the river?", "And why?"], ["Explain a walk."], ["Write of Paris."]])
    told = [word for word in settings() if not word.startswith("server")]
    done = Script("extract.py", *told, *SERVER, cwd=tmp_path).wait(timeout_s=300)
    assert done.code == 0, done.output
    store = open_store(tmp_path / "store", need_teacher=True, need_complete=True)
    assert store.manifest["engine"] == {"name": "sglang", "version": "0.5.23"}
    assert {"start", "stored"} <= store.manifest["probes"].keys()
    answers = [json.loads(line) for line in (tmp_path / "store" / "responses.jsonl").read_text().splitlines()]
    assert len(answers) == 4 and all(answer["response_ids"] for answer in answers)
    spec = spec_of(tmp_path / "v")
    reference = InProcessEngine(
        spec, capture_layers=store.manifest["capture_layers"], dtype=torch.float32, device="cpu"
    )
    wanted = {(*a["prompt_ids"], *a["response_ids"])[: int(SETTINGS["extraction.max_len"])] for a in answers}
    for sample in store.samples:
        found = store.read(sample, ("input_ids", "aux", "last"))
        ids = found["input_ids"].tolist()
        assert tuple(ids) in wanted
        (states,) = reference.capture([ids])
        torch.testing.assert_close(found["aux"], states.aux, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found["last"], states.last, rtol=1e-4, atol=1e-4)
    for answer in answers:
        (greedy,) = reference.generate([answer["prompt_ids"]], max_new_tokens=len(answer["response_ids"]),
                                       temperature=0, top_p=1, seed=0, stop_ids=spec.end_of_turn_ids)  # fmt: skip
        assert answer["response_ids"] == greedy.ids
    for life, spoils in (("respond", False), ("capture", True)):
        command = (tmp_path / "store" / "server" / life / "command.txt").read_text()
        assert ("--disable-radix-cache" in command) == ("--disable-cuda-graph" in command) == spoils
