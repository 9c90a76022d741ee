"""extract.py server=sglang as a whole, on a fake server: resumed wherever it is killed, and nothing outlives it."""

import json
import os
import re
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from composed import config
from fake_sglang import installed
from safetensors.torch import load_file, save_file
from scripts import Script, killed, run, succeed
from tiny import tiny_verifier
from tiny_job import SUBJECTS, settings, write_prompts
from tiny_serve import ours

from eagle3.config import ConfigError, typed
from extract.engines.sglang_command import check_flags, data_parallel_groups, sglang_command
from extract.engines.standby import hold_capture_server
from extract.layers import default_capture_layers
from extract.store import open_store
from extract.verifier import resolve_verifier
from tests.composed import changed
from tests.test_vllm_server import SPEC


@pytest.fixture
def job(tmp_path):
    """The command line of an extraction in `tmp_path`, whose verifier finds every token equally likely."""
    weights = tiny_verifier(tmp_path / "v") / "model.safetensors"
    save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(weights).items()}, weights,
              metadata={"format": "pt"})  # fmt: skip
    write_prompts(tmp_path / "p.jsonl", [[f"What is {subject}?", "And why?"] for subject in SUBJECTS])
    (tmp_path / "memory").mkdir()
    server = {"server": "sglang", "server__python": sys.executable, "server__capture__spool": tmp_path / "memory",
              "server__capture__spool_mib": 4, "server__request_timeout_s": 20}  # fmt: skip
    return [*settings(**server), f"server.env.PYTHONPATH={installed(tmp_path / 'site')}"]


def responses(folder):
    return (folder / "store" / "responses.jsonl").read_text()


def is_clean(folder, within_s=15.0):
    deadline = time.monotonic() + within_s
    while (left := ours(folder)) or list((folder / "memory").iterdir()):
        assert time.monotonic() < deadline, (left, list((folder / "memory").iterdir()))
        time.sleep(0.05)
    return True


def test_a_dry_run_shows_both_command_lines_and_starts_nothing(job, tmp_path):
    done = succeed("extract.py", *job, "dry_run=true", cwd=tmp_path)
    lines = [line for line in done.output.splitlines() if "-m sglang.launch_server" in line]
    assert len(lines) == 2 and all(f"--model-path {tmp_path / 'v'}" in line for line in lines)
    assert ["--disable-radix-cache" in line for line in lines] == [False, True]
    assert not (tmp_path / "store").exists() and is_clean(tmp_path)


@pytest.mark.parametrize(
    "die",
    [
        ("extract.journal:Journal.append", 2, "after"),
        ("extract.spool:Parts.take", 4, "before"),
        ("extract.store_writer:StoreWriter.flush", 1, "after"),
        ("extract.engines.sglang:SglangEngine.recheck", 1, "before"),
    ],
    ids=["while it answers", "while it captures", "with a shard on disk", "before the last probe"],
)
def test_killed_anywhere_the_same_command_goes_on_and_leaves_nothing(job, tmp_path, die):
    killed("extract.py", *job, cwd=tmp_path, die=die)
    before = responses(tmp_path)
    assert is_clean(tmp_path)
    done = succeed("extract.py", *job, cwd=tmp_path)
    assert responses(tmp_path).startswith(before) and len(responses(tmp_path).splitlines()) == 2 * len(SUBJECTS)
    store = open_store(tmp_path / "store", need_teacher=True, need_complete=True)
    assert store.manifest["counts"]["quarantined"] == 0 and "stored" in store.manifest["probes"]
    assert len(store.samples) >= len(SUBJECTS) and is_clean(tmp_path)
    if die[0].startswith("extract.spool"):
        assert "server/respond/server.log" not in done.output, "what was answered is not asked again"


def test_killed_before_the_last_pass_no_server_is_started_again(job, tmp_path):
    killed("extract.py", *job, cwd=tmp_path, die=("extract.stages:teach_all", 1, "before"))
    done = succeed("extract.py", *job, cwd=tmp_path)
    assert "starting a server" not in done.output and is_clean(tmp_path)
    assert open_store(tmp_path / "store", need_teacher=True, need_complete=True).manifest["probes"]["restarts"] == 0


def test_the_server_starts_while_the_capture_is_planned_and_ends_with_it(job, tmp_path):
    done = run("extract.py", *job, cwd=tmp_path, die=("extract.stages:require_supervision", 1, "ctrl-c"))
    assert done.code == 130 and (tmp_path / "store" / "server" / "capture" / "command.txt").exists(), done.output
    assert is_clean(tmp_path)


@pytest.mark.parametrize(("life", "request_"), [("respond", 3), ("capture", 13)])
def test_ctrl_c_in_the_middle_ends_servers_and_requests_at_once(job, tmp_path, life, request_):
    script = Script("extract.py", *job, f"server.env.FAKE='hangs_at={request_}'", cwd=tmp_path)
    log = tmp_path / "store" / "server" / life / "server.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and "fired up" in log.read_text()):
        assert time.monotonic() < deadline, script.output()
        time.sleep(0.05)
    time.sleep(1)  # it hangs now, or soon: either must end
    os.kill(script.process.pid, 2)
    began = time.monotonic()
    done = script.wait(timeout_s=30)
    assert done.code == 130 and time.monotonic() - began < 15, done.output
    assert is_clean(tmp_path)


def test_a_server_that_never_starts_fails_with_exit_code_1_and_its_words(job, tmp_path):
    done = run("extract.py", *job, "server.env.FAKE=dies", cwd=tmp_path)
    assert done.code == 1 and "exit code 3 in its phase weights" in done.output and "out of memory" in done.output
    assert is_clean(tmp_path)


def test_a_job_whose_rows_never_come_fails_and_its_journal_is_kept(job, tmp_path):
    done = run("extract.py", *job, "server.env.FAKE='nan_at=1'", cwd=tmp_path)
    assert done.code == 1 and "NaN or inf" in done.output, done.output
    assert len(responses(tmp_path).splitlines()) == 2 * len(SUBJECTS)
    assert not json.loads((tmp_path / "store" / "manifest.json").read_text())["complete"] and is_clean(tmp_path)


def test_of_two_replicas_one_is_lost_and_the_job_is_done_and_tells_it(job, tmp_path):
    told = ("server.replicas=2", "server.env.CUDA_VISIBLE_DEVICES='4,7'", "server.env.FAKE='on=7,nan_at=1'")
    done = succeed("extract.py", *job, *told, cwd=tmp_path)
    assert "replica1islost,1of2goon:" in done.words() and "servers2,1ofthemlost" in done.words()
    store = open_store(tmp_path / "store", need_teacher=True, need_complete=True)
    assert (store.manifest["probes"]["servers"], store.manifest["probes"]["servers_lost"]) == (2, 1)
    assert store.manifest["counts"]["quarantined"] == 0 and len(store.samples) >= len(SUBJECTS)
    for number, device in enumerate("47"):
        for life in ("respond", "capture"):
            line = (tmp_path / "store" / "server" / f"replica_{number}" / life / "command.txt").read_text()
            assert f"CUDA_VISIBLE_DEVICES={device} " in line
    assert is_clean(tmp_path)


def test_an_extraction_on_held_servers_is_killed_and_goes_on_and_they_live(job, tmp_path):
    spec = resolve_verifier(
        str(tmp_path / "v"), name="tiny", cache_dir=tmp_path, chat_template=None, trust_remote_code=False
    )
    server = config(*job[:-1], f"server.env.PYTHONPATH={tmp_path / 'site'}", script="extract").server
    with ExitStack() as stack:
        held = [
            stack.enter_context(hold_capture_server(
                spec, server, capture_layers=default_capture_layers(spec.num_layers), dtype="float32", env={},
                log_dir=tmp_path / f"held_{number}"))
            for number in range(2)
        ]  # fmt: skip
        told = [*job[:-1], f"server.urls=[{','.join(one.url for one in held)}]"]
        before = ours(tmp_path)
        killed("extract.py", *told, cwd=tmp_path, die=("extract.spool:Parts.take", 6, "before"))
        answered = responses(tmp_path)
        done = succeed("extract.py", *told, cwd=tmp_path)
        assert responses(tmp_path) == answered and "servers2,0ofthemlost" in done.words()
        assert ours(tmp_path) == before and len(before) >= 2, "they were neither ended nor started again"
        assert not (tmp_path / "store" / "server").exists()
        assert all(not list((one.folder / "parts").iterdir()) for one in held)
    store = open_store(tmp_path / "store", need_teacher=True, need_complete=True)
    assert store.manifest["counts"]["quarantined"] == 0 and store.manifest["engine"]["version"] == "0.5.23"
    assert is_clean(tmp_path)


def command(life, version="0.5.23", flags=None, capture=None):
    server = config("server=sglang", script="extract").server
    told = vars(server) | {"flags": flags or {}, "capture": server.capture.__class__(
        **vars(server.capture) | {"flags": capture or {}})}  # fmt: skip
    return sglang_command(Path("/env/bin/python"), SPEC, server.__class__(**told), life, port=8000, name="tiny-1",
                          dtype="bfloat16", version=version)  # fmt: skip


def test_the_command_lines_are_the_ones_that_were_tried_by_hand():
    flags = {"tp_size": 8, "enable_mixed_chunk": True, "attention-backend": "triton", "quantization": None}
    common = [
        "/env/bin/python", "-m", "sglang.launch_server", "--model-path", "/models/tiny",
        "--served-model-name", "tiny-1", "--host", "127.0.0.1", "--port", "8000", "--dtype", "bfloat16",
        "--random-seed", "0", "--skip-tokenizer-init",
    ]  # fmt: skip
    chosen = ["--tp-size", "8", "--enable-mixed-chunk", "--attention-backend", "triton"]
    only = {"chunked_prefill_size": 8192}
    assert command("respond", flags=flags, capture=only) == common + chosen
    assert command("capture", flags=flags, capture=only) == [
        *common, "--disable-radix-cache", "--disable-cuda-graph", *chosen, "--chunked-prefill-size", "8192",
    ]  # fmt: skip


def test_versions_without_plugins_are_hooked_by_the_other_way():
    words = command("capture", version="0.5.10.post1")
    (hook,) = json.loads(words[words.index("--forward-hooks") + 1])
    assert hook["hook_factory"] == "eagle3_capture.install:fallback"
    assert "--forward-hooks" not in command("capture", version="0.5.12.post1")
    assert "--forward-hooks" not in command("respond", version="0.5.10.post1")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"enable_two_batch_overlap": True}, "its layers skip the capture"),
        ({"enable_attn_tp_input_scattered": True}, "scatters the rows"),
        ({"enable-layernorm-sp": True}, "scatters the rows"),
        ({"pp_size": 2}, "other ranks than the last"),
        ({"speculative_algorithm": "EAGLE3"}, "also speculates"),
        ({"enable_return_hidden_states": True}, "as text"),
        ({"disable_radix_cache": False}, "capture needs it"),
        ({"port": 1}, "is set by this program"),
        ({"model_path": "x"}, "is set by this program"),
    ],
)
def test_a_flag_that_would_spoil_the_capture_is_refused_by_name(flags, words):
    for where in ("flags", "capture"):
        with pytest.raises(ValueError, match=rf"server\.flags\.[\w-]+.*{words}"):
            command("capture", **{where: flags})


def test_one_that_changes_nothing_passes_and_one_without_effect_is_told(caplog):
    check_flags({"pp-size": 1, "enable-two-batch-overlap": False, "speculative-algorithm": None})
    check_flags({"num-continuous-decode-steps": 4})
    assert "num-continuous-decode-steps has no effect: SGLang has parsed it" in caplog.text


@pytest.mark.parametrize(
    ("flags", "groups", "ranks"),
    [
        ({}, 1, 1), ({"tp_size": 8}, 1, 8), ({"tp": 4, "dp": 2}, 1, 8),
        ({"tp_size": 8, "dp_size": 4, "enable_dp_attention": True}, 4, 8), ({"tp_size": 8, "attn_dp_size": 2}, 2, 8),
    ],
)  # fmt: skip
def test_ranks_and_groups_are_counted_as_sglang_does(flags, groups, ranks):
    server = config("server=sglang", script="extract").server
    assert data_parallel_groups(server.__class__(**vars(server) | {"flags": flags})) == (groups, ranks)


def test_a_capturing_server_needs_its_settings_and_others_take_none():
    with pytest.raises(ConfigError, match=r"server\.engine=sglang needs server\.capture"):
        typed(changed(**{f"server__{key}": value for key, value in {
            "engine": "sglang", "python": "p", "start_timeout_s": 1, "request_timeout_s": 1}.items()}))  # fmt: skip
    for key in ("concurrency", "spool_mib", "phase_timeouts_s.weights"):
        with pytest.raises(ConfigError, match=rf"server\.capture\.{key}"):
            config("server=sglang", f"server.capture.{key}=0", script="extract")


def test_a_verifier_whose_layers_sglang_cannot_name_is_refused_before_anything_starts(job, tmp_path):
    tiny_verifier(tmp_path / "g", family="gemma")
    told = [word for word in job if not word.startswith("verifier.path")]
    done = run("extract.py", *told, "verifier.path=g", cwd=tmp_path)
    assert done.code == 1 and "howSGLangnumbersthelayersof'gemma'isnotknown" in done.words()
    assert not (tmp_path / "store").exists() and is_clean(tmp_path)


def test_serve_py_holds_a_server_from_which_an_extraction_takes_everything(job, tmp_path):
    holder = Script("serve.py", *job, "serving=capture", cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not (told := re.search(r"server\.urls=\[(http\S+)\]", holder.output())):
        assert time.monotonic() < deadline and holder.process.is_alive(), holder.output()
        time.sleep(0.05)
    held = ours(tmp_path)
    # It was started with what `job` says; what attaches to it says nothing of how it is started.
    attaching = [word for word in job if not word.startswith(("server.python", "server.env"))]
    succeed("extract.py", *attaching, f"server.urls=[{told[1]}]", cwd=tmp_path)
    assert open_store(tmp_path / "store", need_teacher=True, need_complete=True).samples
    assert ours(tmp_path) == held, "another server was started"
    os.kill(holder.process.pid, signal.SIGINT)
    done = holder.wait(timeout_s=30)
    assert done.code == 0 and "Traceback" not in done.output and is_clean(tmp_path), done.output
    others = [word for word in job if not word.startswith("server")]
    refused = run("serve.py", *others, "serving=capture", "server=vllm", cwd=tmp_path)
    assert refused.code == 1 and "serving.mode=capture holds an SGLang server" in refused.output
