"""Whatever SGLang gets wrong is told, tried again within bounds and never stored; nothing of it stays behind."""

import re
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from composed import config
from fake_sglang import CHUNK, HIDDEN, MAX_INPUT, VOCAB, installed
from test_vllm_server import SPEC as OTHER

from extract import spool
from extract.config import Server
from extract.engines import servers, sglang
from extract.engines.base import EngineError, EngineGone
from extract.engines.servers import OwnServers
from extract.engines.sglang import SglangEngine
from extract.lazy import LazyEngine
from extract.pipeline import capture_all
from extract.retry import Failure, Patience
from extract.samples import Sample
from extract.store import create_or_resume, open_store

LAYERS = (1, 3, 6)
SPEC = OTHER.__class__(**{**vars(OTHER), "hidden_size": HIDDEN, "vocab_size": VOCAB})
PROMPTS = [[10 * n + place % 7 for place in range(5 + 3 * n)] for n in range(1, 10)]
"""Prompt n holds the id 10 n, and no other does."""


def fake_server(site, memory, faults="", **settings):
    """Its settings; a keyword with __ replaces one below server.capture."""
    base = config("server=sglang", script="extract").server
    told = vars(base) | {"python": sys.executable, "env": {"PYTHONPATH": str(site), "FAKE": faults},
                         "start_timeout_s": 30.0, "request_timeout_s": 5.0}  # fmt: skip
    capture = vars(base.capture) | {"spool": str(memory), "spool_mib": 1, "concurrency": 4}
    capture |= {key.removeprefix("capture__"): settings.pop(key) for key in list(settings) if "__" in key}
    return Server(**told | settings | {"capture": base.capture.__class__(**capture)})


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Engines on fake servers; see `fake_server`."""
    site = installed(tmp_path / "site")
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(sglang, "load_head", lambda spec: torch.zeros(spec.vocab_size, spec.hidden_size))
    monkeypatch.setattr(spool, "SETTLE_S", 0.5)
    engines = []

    def start(faults="", **settings):
        server = fake_server(site, memory, faults, **settings)
        engines.append(
            SglangEngine(
                SPEC, OwnServers("own", SPEC, server, version="0.5.23", capture_layers=LAYERS, dtype="float32",
                                 env={}, log_dir=tmp_path / "log"),
                capture_layers=LAYERS, dtype=torch.float32)
        )  # fmt: skip
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
    assert not list(memory.iterdir()), "something was left in memory"


def wanted(ids):
    return torch.tensor(ids)[:, None] + torch.arange(4 * HIDDEN) / 100


def assert_right(states, ids):
    found = torch.cat([states.aux, states.last], dim=1)
    torch.testing.assert_close(found, wanted(ids), rtol=1e-6, atol=1e-6)


def test_every_sequence_gets_its_own_rows_whatever_the_order_in_which_they_come(opened):
    engine = opened("late_at=5")
    for _ in range(2):
        for states, ids in zip(engine.capture(PROMPTS), PROMPTS, strict=True):
            assert_right(states, ids)
    assert engine.capture([]) == []


def test_a_server_that_closes_idle_connections_never_breaks_a_request_off(opened):
    """uvicorn does so after five seconds, now and then just when the next request is on its way."""
    engine, patience = opened("one_each"), Patience()
    for _ in range(3):
        for states, ids in zip(patience.run(engine.capture, PROMPTS), PROMPTS, strict=True):
            assert_right(states, ids)
    assert patience.failures == 0


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("fewer_of=30", r"13 of 14 rows came within 0\.5 s of the answer"),
        ("cached_of=50", rf"0 of 20 rows came .*parts begin at \[{CHUNK}\]; .*a prefix cache is on"),
        ("nan_of=30", "NaN or inf in last at token 13"),
        ("half_of=30", "is no whole part"),
        ("others_of=30", "states of other tokens than were sent"),
        ("full_of=30", "could not hand over states: OSError: .*No space left on device"),
        ("fails_of=30", "answered /generate with 500: .*out of luck"),
    ],
)
def test_a_sequence_that_comes_out_wrong_is_given_up_with_its_reason_and_no_other(opened, monkeypatch, fault, words):
    monkeypatch.setattr("extract.engines.sglang_server.DYING_S", 0.05)
    engine, patience = opened(fault), Patience()
    engine.capture(PROMPTS[7:8])  # the probe, with another sequence
    bad = int(fault.partition("=")[2]) // 10 - 1
    results = patience.run(engine.capture, PROMPTS)
    for number, (result, ids) in enumerate(zip(results, PROMPTS, strict=True)):
        if number != bad:
            assert_right(result, ids)
    assert isinstance(results[bad], Failure)
    assert re.search(words, results[bad].reason)
    assert patience.failures == 4, "in its batch, in its group, and twice alone"


def test_one_that_kills_the_server_is_given_up_and_the_others_are_captured(opened):
    engine = opened("dies_of=30")
    engine.capture(PROMPTS[7:8])
    results = Patience().run(engine.capture, PROMPTS[:5])
    assert [isinstance(result, Failure) for result in results] == [False, False, True, False, False]
    assert "exit code 137 (SIGKILL)" in results[2].reason and 3 <= engine.servers.restarts <= servers.RESTARTS


def test_servers_that_die_again_and_again_end_the_job_and_blame_no_sample(opened, monkeypatch):
    monkeypatch.setattr(servers, "RESTARTS", 1)
    engine = opened("dies_at=4")
    patience = Patience()
    with pytest.raises(EngineGone, match=r"1 servers were started in place of others; (?s:.*)SIGKILL"):
        for _ in range(3):
            patience.run(engine.capture, PROMPTS)


def test_failing_from_the_nth_request_on_stops_the_job(opened, monkeypatch):
    monkeypatch.setattr("extract.engines.sglang_server.DYING_S", 0.05)
    engine, patience = opened("fails_from=5"), Patience(stop_after=3)
    with pytest.raises(EngineError, match="3 requests in a row failed, the engine seems broken"):
        patience.run(engine.capture, PROMPTS)


def test_one_that_hangs_is_told_after_the_request_s_time(opened):
    engine = opened("hangs_of=30", request_timeout_s=0.5)
    engine.capture(PROMPTS[7:8])
    began = time.monotonic()
    (result,) = Patience(attempts=1).run(engine.capture, PROMPTS[2:3])
    assert "has not answered /generate within 0.5 s" in result.reason and time.monotonic() - began < 4


def test_one_that_hangs_is_started_again_for_the_others(opened):
    engine = opened("hangs_of=30", request_timeout_s=0.3)
    engine.capture(PROMPTS[7:8])
    results = Patience(attempts=2).run(engine.capture, PROMPTS[:4])
    assert [isinstance(result, Failure) for result in results] == [False, False, True, False]
    assert 2 <= engine.servers.restarts <= servers.RESTARTS


@contextmanager
def stranger():
    """A server that answers {} to whatever it is asked: its address, and what it was asked."""
    asked = []

    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()


def test_a_stranger_on_the_port_is_named_and_gets_no_prompt(opened, monkeypatch):
    with stranger() as (url, asked):
        monkeypatch.setattr("extract.engines.sglang_server.free_port", lambda: int(url.rpartition(":")[2]))
        with pytest.raises(EngineGone, match=r"a stranger answers on .*/v1/models gave 200|Address already in use"):
            opened().capture(PROMPTS)
    assert set(asked) <= {"/health", "/v1/models"}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("dies", r"exit code 3 in its phase weights;(?s:.*)RuntimeError: out of memory"),
        ("not_ready", "0 of 1 ranks are ready to capture"),
        ("radix_cache", r"runs with \{'disable_radix_cache': False\}, which would spoil the capture"),
        ("version=0.5.16", r"the server is SGLang 0\.5\.16, and .* has 0\.5\.23"),
        ("nan_at=1", "NaN or inf"),
        ("fewer_at=2", "rows came within"),
    ],
)
def test_a_server_that_is_not_as_it_should_be_is_told_before_the_bulk_and_not_tried_again(opened, fault, words):
    engine = opened(fault)
    with pytest.raises(EngineGone, match=words):
        Patience().run(engine.capture, PROMPTS)


def test_one_that_hangs_in_a_phase_is_stopped_at_that_phase_s_deadline(opened):
    phases = config("server=sglang", script="extract").server.capture.phase_timeouts_s
    engine = opened("hangs_in_weights", capture__phase_timeouts_s=phases.__class__(**vars(phases) | {"weights": 0.5}))
    began = time.monotonic()
    with pytest.raises(EngineGone, match=r"its phase weights took more than 0\.5 s, and is stopped"):
        engine.capture(PROMPTS)
    assert time.monotonic() - began < 10


def test_a_flag_that_this_version_does_not_know_is_told_with_the_version(opened):
    with pytest.raises(ValueError, match=r"SGLang 0\.5\.23 does not know --no-such-flag 3"):
        opened(flags={"no_such_flag": 3}).capture(PROMPTS)


def test_probes_that_disagree_fail_with_their_numbers(opened, monkeypatch):
    head = torch.eye(VOCAB, HIDDEN)
    monkeypatch.setattr(sglang, "load_head", lambda _: head)
    with pytest.raises(EngineGone, match=r"not its verifier's: .*'logprob_mean_difference': \d+.*allowed in"):
        opened().capture(PROMPTS)


def test_stored_states_that_come_out_otherwise_are_an_error(opened):
    engine = opened()
    right = engine.capture(PROMPTS[:2])
    figures = engine.recheck(list(zip(PROMPTS[:2], right, strict=True)), torch.bfloat16)
    assert figures["stored"]["states_max_difference"] == 0 and figures["start"]["logprob_mean_difference"] < 1e-6
    right[0].aux.mul_(1.1)
    with pytest.raises(EngineError, match=r"'states_max_difference': 0\.1000"):
        engine.recheck(list(zip(PROMPTS[:2], right, strict=True)), torch.float32)


def test_ids_and_lengths_that_it_cannot_take_are_never_sent(opened):
    engine = opened()
    for prompt in ([], [VOCAB], [-1]):
        with pytest.raises(ValueError, match=r"ids outside 0 \.\. 99"):
            engine.capture([prompt])
    with pytest.raises(ValueError, match=rf"{MAX_INPUT + 1} tokens is longer than the {MAX_INPUT}"):
        engine.capture([[1] * (MAX_INPUT + 1)])
    with pytest.raises(ValueError, match=r"one sequence takes .* bytes on its way, and server.capture.spool_mib"):
        engine._budget.total = 100
        engine.capture([[1] * 50])


def test_answers_are_read_and_cut_as_the_protocol_says(opened):
    engine = opened()
    told = {"temperature": 0, "top_p": 1, "seed": 0}
    answers = engine.generate([[1], [5], [40]], max_new_tokens=4, stop_ids={4, 44}, **told)
    assert [(answer.ids, answer.finish_reason) for answer in answers] == [
        ([2, 3, 4], "stop"), ([6, 7, 8, 9], "length"), ([41, 42, 43, 44], "stop"),
    ]  # fmt: skip
    assert_right(engine.capture([[1, 2]])[0], [1, 2])  # the other server
    with pytest.raises(EngineError, match="not what was asked for: 3 of at most 4 ids"):
        opened("breaks_off").generate([[1]], max_new_tokens=4, stop_ids=set(), **told)


@pytest.mark.parametrize("fault", ["late_at=9", "fails_at=9", "dies_at=30", "hangs_at=30"])
def test_forty_samples_through_the_store_are_stored_or_given_up_and_none_is_lost(opened, tmp_path, fault):
    engine = opened(f"nan_of=17,{fault}", request_timeout_s=1.0)
    lazy = LazyEngine(lambda: engine, "sglang", "0.5.23", ahead=2, rechecks=True)
    samples = [Sample(f"s{n}", f"c{n}", [2 * n, *range(1, 2 + n % 7)], [1] * (2 + n % 7), 0.0, 1) for n in range(40)]
    samples[11].input_ids[0] = 17
    manifest = {"last": "post_norm", "dtype": "float32", "codec": "none", "capture_layers": list(LAYERS),
                "hidden_size": HIDDEN, "must_match": {}}  # fmt: skip
    with create_or_resume(tmp_path / "store", manifest, shard_bytes=4000) as writer:
        capture_all(lazy, samples, writer, total_tokens=1, batch_tokens=24, dtype=torch.float32)
        assert set(writer.quarantined) == {"s11"}
        writer.finish([sample.id for sample in samples])
    store = open_store(tmp_path / "store")
    found = {ref.id: store.read(ref, ("input_ids", "aux", "last")) for ref in store.samples}
    assert found.keys() == {sample.id for sample in samples} - {"s11"}
    for sample in samples:
        if sample.id in found:
            rows = found[sample.id]
            assert rows["input_ids"].tolist() == sample.input_ids
            torch.testing.assert_close(torch.cat([rows["aux"], rows["last"]], 1), wanted(sample.input_ids))


def test_what_a_killed_run_left_in_memory_is_removed_by_the_next(tmp_path):
    left = tmp_path / "eagle3-dead"
    left.mkdir()
    (left / "lock").touch()
    alive = spool.Spool(tmp_path, budget_bytes=1)
    with spool.Spool(tmp_path, budget_bytes=1) as own:
        assert not left.exists() and alive.folder.exists() and own.folder.exists()
    assert [folder for folder in tmp_path.iterdir()] == [alive.folder]
    alive.close()
    with pytest.raises(ValueError, match=r"server\.capture\.spool=.*is no directory"):
        spool.Spool(Path("/nowhere"), budget_bytes=1)
