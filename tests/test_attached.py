"""Extractions attach to servers that somebody else holds: only to the right ones, one at a time, and never end them."""

import json
import os
import signal
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from fake_sglang import installed
from test_sglang_faults import LAYERS, PROMPTS, SPEC, assert_right, fake_server, stranger

from extract import spool
from extract.engines import sglang, sglang_server
from extract.engines.base import EngineError, EngineGone
from extract.engines.fleet import plan_fleet
from extract.engines.replicas import Replicas
from extract.engines.standby import hold_capture_server
from extract.launcher import ServerDied

GREEDY = {"max_new_tokens": 3, "temperature": 0, "top_p": 1, "seed": 0, "stop_ids": ()}


@pytest.fixture
def memory(tmp_path, monkeypatch):
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(sglang, "load_head", lambda spec: torch.zeros(spec.vocab_size, spec.hidden_size))
    monkeypatch.setattr(spool, "SETTLE_S", 0.5)
    yield tmp_path / "memory"
    assert not list((tmp_path / "memory").iterdir()), "something was left in memory"


@pytest.fixture
def hold(tmp_path, memory):
    """Holds a fake server until the end of the test."""
    site = installed(tmp_path / "site")
    with ExitStack() as stack:

        def start(faults="", layers=LAYERS, spec=SPEC):
            server, log_dir = fake_server(site, memory, faults), tmp_path / f"held{time.monotonic_ns()}"
            holder = hold_capture_server(spec, server, capture_layers=layers, dtype="float32", env={}, log_dir=log_dir)
            return stack.enter_context(holder)

        yield start


@pytest.fixture
def attach(tmp_path, memory):
    """Engines of extractions that attach."""
    with ExitStack() as stack:

        def start(*urls, spec=SPEC, layers=LAYERS, dtype="float32", **settings):
            server = fake_server("", memory, env={}, python="/nowhere/python", urls=list(urls), **settings)
            fleet = plan_fleet(spec, server, capture_layers=layers, dtype=dtype, env={}, log_dir=tmp_path / "log")
            assert fleet.commands == () and fleet.version == "0.5.23"
            engine = fleet.start()
            stack.callback(engine.close)
            return engine

        yield start


def pid_of(holding):
    (ready,) = [json.loads(file.read_text()) for file in holding.folder.glob("READY.*.json")]
    return ready["pid"]


def assert_works(engine):
    for states, ids in zip(engine.capture(PROMPTS), PROMPTS, strict=True):
        assert_right(states, ids)


def test_one_held_server_captures_and_answers_for_one_extraction_after_another(hold, attach):
    holding = hold()
    for host in ("127.0.0.1", "localhost"):
        engine = attach(holding.url.replace("127.0.0.1", host))
        assert engine.servers.prefix.startswith(holding.held.prefix) and engine.servers.prefix != holding.held.prefix
        answers = engine.generate(PROMPTS, **GREEDY)
        assert [answer.ids for answer in answers] == [[(ids[-1] + n) % 100 for n in (1, 2, 3)] for ids in PROMPTS]
        assert not list((holding.folder / "parts").iterdir()), "prompts to be answered are not captured"
        assert_works(engine)
        assert engine.recheck([(PROMPTS[0], engine.capture(PROMPTS[:1])[0])], torch.float32)["restarts"] == 0
        engine.close()
        with pytest.raises(EngineGone, match="the engine is closed"):
            engine.capture(PROMPTS)
        os.kill(pid_of(holding), 0)  # it lives
        assert not list((holding.folder / "parts").iterdir())


def test_a_second_extraction_is_refused_until_the_first_has_ended(hold, attach):
    holding = hold()
    first = attach(holding.url)
    with pytest.raises(ValueError, match=r"another extraction uses http://127\.0\.0\.1:.* right now; wait for its end"):
        attach(holding.url)
    assert_works(first)
    first.close()
    assert_works(attach(holding.url))


def test_one_that_cannot_have_all_its_servers_lets_go_of_those_that_it_had(hold, attach):
    free, taken = hold(), hold()
    first = attach(taken.url)
    with pytest.raises(ValueError, match=f"another extraction uses {taken.url}") as refused:
        attach(free.url, taken.url)
    assert_works(attach(free.url))
    assert_works(first)
    assert refused.value, "until here it has kept alive what was opened, which nobody but the program closes"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"spec": replace(SPEC, sha256="other")}, r"another verifier \(sha256\) a, not other"),
        ({"layers": (2, 3, 6)}, r"another verifier\.capture_layers \[1, 3, 6\], not \[2, 3, 6\]"),
        ({"dtype": "bfloat16"}, r"another verifier\.dtype float32, not bfloat16"),
    ],
)
def test_a_server_that_captures_something_else_is_refused_before_it_is_asked(hold, attach, changes, words):
    with pytest.raises(ValueError, match=rf"server\.urls: http://127.* captures tiny with {words}"):
        attach(hold().url, **changes)


def rewrite(holding, **changes):
    record = holding.folder / "held.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_ids": [1, 3, 6]}, r"another numbers for .* SGLang 0\.5\.23 \[1, 3, 6\], not \[0, 2, 5\]"),
        ({"more": 1}, r"held\.json is of another version of this program"),
    ],
)
def test_a_server_that_numbers_layers_otherwise_or_of_another_program_is_refused(hold, attach, changes, words):
    holding = hold()
    rewrite(holding, **changes)
    with pytest.raises(ValueError, match=words):
        attach(holding.url)


def test_servers_of_two_versions_are_refused(hold, attach):
    one, other = hold(), hold()
    rewrite(other, version="0.5.20")
    with pytest.raises(ValueError, match=r"are of SGLang 0\.5\.20 and 0\.5\.23; name servers of one"):
        attach(one.url, other.url)


def test_a_url_that_nobody_holds_here_is_refused_with_those_that_are_held(hold, attach, memory):
    with pytest.raises(ValueError, match=r"nobody holds http://other:1 for capture .*=.*memory there are none"):
        attach("http://other:1")
    holding = hold()
    with pytest.raises(ValueError, match=rf"nobody holds http://other:1 .* there are \['{holding.url}'\]"):
        attach("http://other:1")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_path": "/other"}, "its model_path is /models/tiny, and it was started with /other"),
        ({"version": "0.5.22"}, r"its version is 0\.5\.23, and it was started with 0\.5\.22"),
        ({"name": "tiny-0000"}, "a stranger answers on .*, not our server tiny-0000"),
        ({"ranks": 2}, "1 of 2 ranks are ready to capture"),
    ],
)
def test_a_server_that_is_not_the_one_of_its_record_is_refused(hold, attach, changes, words):
    holding = hold()
    rewrite(holding, **changes)
    server = fake_server("", holding.folder.parent, env={}, urls=[holding.url])
    fleet = plan_fleet(SPEC, server, capture_layers=LAYERS, dtype="float32", env={}, log_dir=holding.folder)
    with pytest.raises(ValueError, match=rf"server\.urls: {holding.url} cannot be used: .*{words}"):
        fleet.start()
    rewrite(holding, **{key: getattr(holding.held, key) for key in changes})
    assert_works(attach(holding.url))


def test_flags_that_spoil_and_ranks_that_capture_other_layers_are_refused(hold, attach, monkeypatch):
    holding = hold()
    monkeypatch.setattr(sglang_server, "MUST_BE", {"disable_radix_cache": (False,)})
    with pytest.raises(ValueError, match=r"runs with \{'disable_radix_cache': True\}, which would spoil the capture"):
        attach(holding.url)
    monkeypatch.undo()
    monkeypatch.setattr(sglang, "load_head", lambda spec: torch.zeros(spec.vocab_size, spec.hidden_size))
    (ready,) = holding.folder.glob("READY.*.json")
    ready.write_text(json.dumps(json.loads(ready.read_text()) | {"layers": [1, 2, 6]}))
    with pytest.raises(ValueError, match=r"its ranks capture other layers than \[1, 3, 6\]"):
        attach(holding.url)


def test_a_stranger_and_another_held_server_behind_the_url_get_no_prompt(hold, attach):
    one, other = hold(), hold()
    with stranger() as (url, asked):
        rewrite(one, url=url)
        with pytest.raises(ValueError, match=r"a stranger answers on .*, not our server tiny-"):
            attach(url)
    assert set(asked) == {"/health", "/v1/models"}
    rewrite(one, url=other.url)
    rewrite(other, url=url)
    with pytest.raises(ValueError, match=r"a stranger answers on .*, not our server tiny-"):
        attach(other.url)


def gone(folder, within_s=15.0):
    deadline = time.monotonic() + within_s
    while folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return True


def test_a_server_that_died_is_told_to_its_holder_and_refused(hold, attach):
    holding = hold()
    os.kill(pid_of(holding), signal.SIGKILL)
    with pytest.raises(ServerDied, match=r"exit code 137 \(SIGKILL\)"):
        holding.wait()
    assert gone(holding.folder)
    with pytest.raises(ValueError, match=f"nobody holds {holding.url}"):
        attach(holding.url)


def test_one_whose_record_is_still_there_but_that_does_not_answer_is_refused(hold, attach):
    holding = hold()
    rewrite(holding, url="http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"server\.urls: http://127\.0\.0\.1:9 cannot be used: it does not answer"):
        attach("http://127.0.0.1:9")


def test_one_that_dies_while_attached_is_gone_and_is_not_started_again(hold, attach):
    engine = attach(hold("dies_of=30").url)
    assert_right(engine.capture(PROMPTS[:1])[0], PROMPTS[0])
    with pytest.raises(EngineError, match=r"has ended, or is held no more(?s:.*)fired up"):
        engine.capture(PROMPTS[2:3])
    with pytest.raises(EngineGone, match="has ended, or is held no more"):
        engine.capture(PROMPTS[:1])


def test_of_two_attached_servers_the_other_goes_on(hold, attach):
    one, other = hold(), hold()
    engine = attach(one.url, other.url)
    assert isinstance(engine, Replicas)
    assert_works(engine)
    os.kill(pid_of(one), signal.SIGKILL)
    assert gone(one.folder)
    assert_works(engine)
    assert list(engine.lost) == [one.url]
    assert [answer.ids[0] for answer in engine.generate(PROMPTS, **GREEDY)] == [ids[-1] + 1 for ids in PROMPTS]


def test_what_a_killed_extraction_left_and_what_still_comes_for_it_is_deleted(hold, attach):
    holding = hold("late_at=1")
    parts = holding.folder / "parts"
    (parts / f"{holding.held.prefix}dead-1.0.safetensors").write_bytes(b"rows")
    (holding.folder / "FAILED.1").write_text("OSError: of another extraction")
    engine = attach(holding.url)
    assert not list(parts.iterdir())
    (parts / f"{holding.held.prefix}dead-2.0.safetensors").write_bytes(b"rows")
    assert_works(engine)
    assert not list(parts.iterdir())


def test_closing_breaks_off_what_is_under_way_and_leaves_the_server_alone(hold, attach):
    holding = hold("hangs_of=30")
    engine = attach(holding.url, request_timeout_s=120.0)
    engine.capture(PROMPTS[:1])
    errors = []

    def work():
        try:
            engine.capture(PROMPTS[2:3])
        except EngineError as error:
            errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    engine.close()
    thread.join(60)
    assert not thread.is_alive() and "was stopped while it worked on /generate" in errors[0]
    os.kill(pid_of(holding), 0)
    assert_right(attach(holding.url).capture(PROMPTS[:1])[0], PROMPTS[0])
