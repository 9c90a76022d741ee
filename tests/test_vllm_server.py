"""vLLM's server is started, asked and counted as it really is; whatever it gets wrong is told and never passed on."""

import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from composed import changed, config
from stub_server import VOCAB, installed

from eagle3.config import ConfigError, typed
from extract import job, local_http
from extract.config import Server
from extract.engines import vllm
from extract.engines.base import Counters
from extract.engines.vllm import open_vllm, vllm_command
from extract.launcher import ServerDied, ServerError, ServerHung
from extract.verifier import VerifierSpec

SPEC = VerifierSpec(
    name="tiny", path=Path("/models/tiny"), sha256="a", tokenizer_sha256="b", chat_template_sha256="c",
    model_type="llama", hidden_size=8, num_layers=7, vocab_size=VOCAB, num_heads=2, num_kv_heads=2, head_dim=4,
    intermediate_size=16, rms_norm_eps=1e-5, hidden_act="silu", rope_parameters={}, max_position_embeddings=512,
    tied_head=True, end_of_turn_ids=(2,), source="tiny", trust_remote_code=False,
)  # fmt: skip


@pytest.fixture
def opened(tmp_path):
    """Starts the stub with faults; the last argument replaces settings of the server."""
    site = installed(tmp_path / "site")

    def start(faults="", *, drafts=None, log_dir=tmp_path / "log", **settings):
        told = {"engine": "vllm", "python": sys.executable, "flags": {}, "start_timeout_s": 30.0,
                "request_timeout_s": 10.0, "replicas": 1, "urls": [], "capture": None, "speculation": None,
                "env": {"PYTHONPATH": str(site), "STUB": faults}} | settings  # fmt: skip
        drafter = None if drafts is None else tmp_path / "drafter"
        return open_vllm(Server(**told), SPEC, dtype="bfloat16", drafter=drafter, drafts=drafts, log_dir=log_dir)

    return start


def ask(server, prompt=(3, 4, 5), *, max_new_tokens=4, stop_ids=()):
    return server.complete(prompt, max_new_tokens=max_new_tokens, stop_ids=stop_ids)


def test_the_command_line_is_the_one_that_was_tried_by_hand():
    flags = {"enforce_eager": True, "max_num_seqs": 4, "enable-prefix-caching": False, "quantization": None,
             "hf_overrides": {"a": [1]}, "gpu_memory_utilization": 0.5}  # fmt: skip
    command = vllm_command(
        Path("/env/bin/python"), SPEC, 8000, flags, name="tiny-1", dtype="bfloat16", drafter=Path("/d"), drafts=3
    )
    assert command == [
        "/env/bin/python", "-m", "vllm.entrypoints.openai.api_server",
        "--model", "/models/tiny", "--served-model-name", "tiny-1", "--host", "127.0.0.1", "--port", "8000",
        "--seed", "0", "--generation-config", "vllm", "--dtype", "bfloat16",
        "--speculative-config", '{"method": "eagle3", "model": "/d", "num_speculative_tokens": 3}',
        "--per-request-spec-decode-metrics", "detailed",
        "--enforce-eager", "--max-num-seqs", "4", "--no-enable-prefix-caching", "--hf-overrides", '{"a": [1]}',
        "--gpu-memory-utilization", "0.5",
    ]  # fmt: skip


def test_without_a_drafter_nothing_speaks_of_speculation():
    command = vllm_command(Path("p"), SPEC, 1, {}, name="n", dtype="float32", drafter=None, drafts=None)
    assert not [word for word in command if "spec" in word] and "float32" in command


@pytest.mark.parametrize("key", ["port", "served_model_name", "served-model-name", "speculative_config",
                                 "speculative-config.method", "spec_tokens", "generation_config", "seed"])  # fmt: skip
def test_a_flag_that_this_program_decides_is_refused_by_name(key):
    with pytest.raises(ValueError, match=rf"server\.flags\.{key} is set by this program"):
        vllm_command(Path("p"), SPEC, 1, {key: 1}, name="n", dtype="float32", drafter=None, drafts=None)


def test_ids_go_in_and_come_out_whatever_proxy_the_machine_has(opened, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with opened() as server:
        assert server.version == "0.0.stub"
        answer = ask(server)
        assert (answer.ids, answer.finish_reason, answer.accepted, answer.drafted) == ((6, 7, 8, 9), "length", (), ())
        assert 0 < answer.seconds < 5


def test_the_token_that_ends_the_turn_is_kept(opened):
    with opened() as server:
        answer = ask(server, max_new_tokens=50, stop_ids={8, 20})
    assert (answer.ids, answer.finish_reason) == ((6, 7, 8), "stop")


def test_what_each_answer_says_sums_to_the_server_s_own_counters(opened):
    with opened(drafts=3) as server:
        before = server.counters()
        assert before == Counters(0, 0, 0, (0, 0, 0))
        ask(server)
        before = server.counters()
        answers = [ask(server, max_new_tokens=length) for length in (1, 2, 9, 24)]
        after = server.counters()
        assert [len(answer.accepted) for answer in answers] == [0, 1, 3, 9]
        accepted = [count for answer in answers for count in answer.accepted]
        drafted = [count for answer in answers for count in answer.drafted]
        by_position = tuple(sum(count > place for count in accepted) for place in range(3))
        assert (after.drafts - before.drafts, after.draft_tokens - before.draft_tokens) == (13, sum(drafted))
        assert after.accepted - before.accepted == sum(accepted)
        pairs = zip(before.accepted_per_pos, after.accepted_per_pos, strict=True)
        assert tuple(late - early for early, late in pairs) == by_position


def test_counters_that_are_missing_are_an_error_and_never_zero(opened):
    with opened("miscounts", drafts=3) as server, pytest.raises(ServerError, match=r"lack .*'draft_tokens', 'drafts'"):
        server.counters()
    with opened() as server, pytest.raises(ValueError, match="without a drafter"):
        server.counters()


def test_a_field_that_the_server_ignores_is_noticed(opened):
    with (
        opened("ignores_ids") as server,
        pytest.raises(ServerError, match=r"lacks what was asked for: .*\.token_ids: "),
    ):
        ask(server)


def test_ids_outside_the_vocabulary_are_never_sent(opened, tmp_path):
    with opened() as server:
        for prompt in ((), (3, VOCAB), (-1,)):
            with pytest.raises(ValueError, match=r"ids outside 0 \.\. 99"):
                ask(server, prompt)
        assert "completion" not in (tmp_path / "log" / "server.log").read_text()


def test_a_refusal_is_told_in_the_server_s_words(opened):
    with opened() as server:
        with pytest.raises(ValueError, match=r"refused /v1/completions with 400: .*refused: tiny-"):
            ask(server, max_new_tokens=0)
        assert ask(server).ids == (6, 7, 8, 9)


def test_one_that_dies_at_its_start_is_told_with_its_log(opened):
    with pytest.raises(ServerDied, match=r"exit code 3;(?s:.*)RuntimeError: no such quantisation"):
        opened("dies")


def test_one_that_dies_while_it_answers_is_told_with_its_log(opened):
    with opened("dies_at=2") as server:
        ask(server)
        with pytest.raises(ServerDied, match=r"exit code 137 \(SIGKILL\);(?s:.*)completion 2"):
            ask(server)
        with pytest.raises(ServerDied, match="SIGKILL"):
            ask(server)


def test_one_that_fails_and_lives_on_is_told_with_its_words(opened, monkeypatch):
    monkeypatch.setattr(vllm, "DYING_S", 0.1)
    with opened("fails_at=1") as server:
        with pytest.raises(ServerError, match=r"with 500: .*out of luck(?s:.*)completion 1"):
            ask(server)
        assert ask(server).ids == (6, 7, 8, 9)


def test_one_that_hangs_is_told_after_the_request_s_time(opened):
    with opened("hangs_at=1", request_timeout_s=0.5) as server:
        began = time.monotonic()
        with pytest.raises(ServerHung, match=r"not answered /v1/completions within 0\.5 s(?s:.*)completion 1"):
            ask(server)
        assert time.monotonic() - began < 3


def test_one_that_is_never_ready_is_told_at_the_deadline(opened):
    with pytest.raises(ServerHung, match="not ready within 1 s"):
        opened("never_healthy", start_timeout_s=1.0)


def test_one_too_busy_to_say_that_it_is_well_keeps_working(opened):
    with opened("health_blocks") as server:
        assert [ask(server).ids for _ in range(3)] == [(6, 7, 8, 9)] * 3


def test_a_stranger_on_the_port_is_named_and_never_asked(opened, monkeypatch):
    seen = []

    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(self.path)
            self.send_error(404, "File not found")

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as stranger:
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        port = stranger.server_address[1]
        monkeypatch.setattr(vllm, "free_port", lambda: port)
        with pytest.raises(ServerError, match=rf"a stranger answers on http://127\.0\.0\.1:{port}.*/health gave 404"):
            opened()
        stranger.shutdown()
    assert set(seen) == {"/health"}


def test_another_model_s_server_on_the_port_is_named(opened):
    with pytest.raises(
        ServerError, match=r"a stranger answers.*not our server tiny-\w{8}: /v1/models gave 200.*somebody"
    ):
        opened("wrong_model")


def test_a_port_that_somebody_holds_in_silence_is_named(opened, monkeypatch):
    monkeypatch.setattr(local_http, "HEALTH_TIMEOUT_S", 0.2)
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as silent:  # it never serves
        monkeypatch.setattr(vllm, "free_port", lambda: silent.server_address[1])
        with pytest.raises(ServerDied, match=r"exit code 1;(?s:.*)Address already in use"):
            opened()


def test_two_at_once_have_their_own_ports_and_names(opened, tmp_path):
    servers = {}

    def one(number):
        servers[number] = opened(log_dir=tmp_path / str(number))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ports = {int((tmp_path / str(n) / "server.log").read_text().split()[4].rstrip(",")) for n in servers}
    assert len(servers) == len(ports) == len({server.name for server in servers.values()}) == 2
    for number, server in servers.items():
        with server:
            assert ask(server, (number,)).ids[0] == number + 1
    for port in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, "still there"


def test_an_interpreter_that_is_not_there_or_lacks_vllm_is_told_with_the_remedy(opened):
    with pytest.raises(ValueError, match=r"server\.python=nowhere/python: there is no .*make vllm-env"):
        opened(python="nowhere/python")
    with pytest.raises(ValueError, match=r"has no vLLM; .*make vllm-env"):
        opened(env={})


def test_a_server_s_settings_are_complete_before_anything_starts():
    assert config("server=vllm", script="evaluate").server.python == ".venv-vllm/bin/python"
    for key in ("python", "start_timeout_s", "request_timeout_s"):
        with pytest.raises(ConfigError, match=rf"server\.engine=vllm .*needs server\.{key}; .*make vllm-env"):
            config("server=vllm", f"server.{key}=null", script="evaluate")
    with pytest.raises(ConfigError, match=r"takes no server\.start_timeout_s"):
        typed(changed(server__start_timeout_s=5))
    with pytest.raises(ConfigError, match=r"server\.env\.A"):
        config("server=vllm", "server.env.A=null", script="evaluate")


def test_an_extraction_with_an_engine_that_captures_nothing_is_refused_at_once(tmp_path):
    told = config("server=vllm", "extraction.prompts=nowhere.jsonl", script="extract")
    with pytest.raises(ValueError, match=r"server\.engine=vllm cannot capture.*server=inprocess.*evaluate\.py"):
        job.open_job(told.verifier, told.server, told.extraction, told.hardware, tmp_path / "store",
                     cache_dir=tmp_path, seed=0)  # fmt: skip
    assert not list(tmp_path.iterdir())
