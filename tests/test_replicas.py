"""Several servers share one extraction: nothing is lost, doubled or mixed up, whichever of them dies and when."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from composed import config
from fake_sglang import HIDDEN, installed
from hypothesis import given
from hypothesis import strategies as st
from test_sglang_faults import LAYERS, PROMPTS, SPEC, fake_server, wanted

from eagle3.config import ConfigError
from extract import spool
from extract.engines import servers, sglang
from extract.engines.base import EngineError, EngineGone, Generated, SomeFailed
from extract.engines.devices import replicas_of
from extract.engines.fleet import plan_fleet
from extract.engines.replicas import Replicas, joined
from extract.engines.servers import OwnServers
from extract.engines.sglang import SglangEngine
from extract.lazy import LazyEngine
from extract.pipeline import capture_all
from extract.retry import Patience
from extract.samples import Sample
from extract.store import create_or_resume, open_store

GREEDY = {"max_new_tokens": 3, "temperature": 0, "top_p": 1, "seed": 0, "stop_ids": ()}


@pytest.fixture
def replicas(tmp_path, monkeypatch):
    """One fake server for each word of faults, and no restarts: what dies is gone for good."""
    site, memory = installed(tmp_path / "site"), tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(sglang, "load_head", lambda spec: torch.zeros(spec.vocab_size, spec.hidden_size))
    monkeypatch.setattr(spool, "SETTLE_S", 0.5)
    monkeypatch.setattr(servers, "RESTARTS", 0)
    made = []

    def start(*faults):
        engines = [
            SglangEngine(
                SPEC, OwnServers(f"replica {number}", SPEC, fake_server(site, memory, fault), version="0.5.23",
                                 capture_layers=LAYERS, dtype="float32", env={}, log_dir=tmp_path / f"{number}"),
                capture_layers=LAYERS, dtype=torch.float32)
            for number, fault in enumerate(faults)
        ]  # fmt: skip
        made.append(Replicas(engines))
        return made[-1]

    yield start
    for engine in made:
        engine.close()
    assert not list(memory.iterdir()), "something was left in memory"


def stored(engine, folder, count=40):
    """Captures `count` samples into a store, as the pipeline does; returns the figures of the last probe."""
    lazy = LazyEngine(lambda: engine, "sglang", "0.5.23", ahead=4, rechecks=True)
    samples = [Sample(f"s{n}", f"c{n}", [2 * n, *range(1, 2 + n % 7)], [1] * (2 + n % 7), 0.0, 1) for n in range(count)]
    manifest = {"last": "post_norm", "dtype": "float32", "codec": "none", "capture_layers": list(LAYERS),
                "hidden_size": HIDDEN, "must_match": {}}  # fmt: skip
    with create_or_resume(folder, manifest, shard_bytes=4000) as writer:
        capture_all(lazy, samples, writer, total_tokens=1, batch_tokens=24, dtype=torch.float32)
        assert not writer.quarantined
        writer.finish([sample.id for sample in samples])
    store = open_store(folder)
    found = {ref.id: store.read(ref, ("input_ids", "aux", "last")) for ref in store.samples}
    assert len(store.samples) == len(found) == count, "each once"
    for sample in samples:
        rows = found[sample.id]
        assert rows["input_ids"].tolist() == sample.input_ids
        torch.testing.assert_close(torch.cat([rows["aux"], rows["last"]], 1), wanted(sample.input_ids))
    return engine.recheck([(ids, engine.capture([ids])[0]) for ids in PROMPTS[:2]], torch.float32)


def test_both_servers_work_and_every_sample_has_its_own_states(replicas, tmp_path):
    figures = stored(replicas("late_at=9", ""), tmp_path / "store")
    assert (figures["servers"], figures["servers_lost"], figures["restarts"]) == (2, 0, 0)
    assert all("fired up" in (tmp_path / name / "capture" / "server.log").read_text() for name in "01")


@pytest.mark.parametrize("fault", ["dies_at=4", "dies_at=7", "dies", "hangs_at=6", "nan_at=1"])
def test_one_that_is_lost_costs_nothing_but_what_it_had_under_way_and_that_is_told(replicas, tmp_path, caplog, fault):
    engine = replicas("", fault)
    figures = stored(engine, tmp_path / "store")
    assert (figures["servers"], figures["servers_lost"]) == (2, 1) and list(engine.lost) == ["replica 1"]
    assert caplog.text.count("replica 1 is lost, 1 of 2 go on: ") == 1


def test_when_all_are_lost_the_job_ends_with_every_reason_and_blames_no_sample(replicas):
    engine, patience = replicas("dies_at=4", "dies"), Patience()
    with pytest.raises(EngineGone, match=r"(?s)all 2 servers are lost:.*SIGKILL") as raised:
        for _ in range(4):
            patience.run(engine.capture, PROMPTS)
    assert "replica 0: " in str(raised.value) and "replica 1: " in str(raised.value)
    assert "exit code 3 in its phase weights" in str(raised.value)
    with pytest.raises(EngineGone, match="all 2 servers are lost"):
        engine.generate(PROMPTS, **GREEDY)


def test_answers_come_in_order_from_both_and_from_one_when_the_other_dies(replicas, tmp_path):
    engine = replicas("", "dies_at=7")
    for _ in range(3):
        answers = Patience().run(lambda batch: engine.generate(batch, **GREEDY), PROMPTS)
        assert [answer.ids for answer in answers] == [[(ids[-1] + n) % 100 for n in (1, 2, 3)] for ids in PROMPTS]
    assert list(engine.lost) == ["replica 1"]
    assert all("fired up" in (tmp_path / name / "respond" / "server.log").read_text() for name in "01")


def test_closing_ends_all_starts_at_once_and_is_no_loss(replicas, caplog):
    engine = replicas("hangs_in_weights", "hangs_in_weights")
    errors = []

    def work():
        try:
            engine.capture(PROMPTS)
        except EngineGone as error:
            errors.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    threads[0].join(1.0)
    engine.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert len(errors) == 2 and not engine.lost and "is lost" not in caplog.text


class Played:
    """An engine whose answer to a prompt is its first id and its seed; gone after `lives` calls."""

    def __init__(self, number, lives):
        self.servers, self.version = SimpleNamespace(name=f"replica {number}", restarts=0), "0.5.23"
        self.lives, self.calls, self.working = lives, 0, threading.Lock()

    def generate(self, batch, *, seed, **_):
        with self.working:
            self.calls += 1
            if self.calls > self.lives:
                raise EngineGone("dead")
        return [Generated([ids[0], seed + place], "stop") for place, ids in enumerate(batch)]


@given(lives=st.lists(st.integers(0, 3), min_size=1, max_size=4), sizes=st.lists(st.integers(1, 9), max_size=5))
def test_whoever_dies_answers_and_seeds_are_those_of_a_single_engine(lives, sizes):
    engine = Replicas([Played(number, count) for number, count in enumerate([*lives, 1000])])
    for number, size in enumerate(sizes):
        batch = [[100 * number + place] for place in range(size)]
        answers = engine.generate(batch, **GREEDY | {"seed": 7})
        assert [answer.ids for answer in answers] == [[ids[0], 7 + place] for place, ids in enumerate(batch)]
    assert engine._under_way == [0] * (len(lives) + 1)


def test_all_batches_that_are_handed_over_at_once_are_answered_at_once():
    class Meets(Played):
        def generate(self, batch, **_):
            everyone.wait(20)
            return [Generated(ids, "stop") for ids in batch]

    batches, count = SglangEngine.ahead * 2, 2
    everyone = threading.Barrier(batches * count)
    engine = Replicas([Meets(number, 9) for number in range(count)])
    with ThreadPoolExecutor(batches) as pool:
        answers = list(pool.map(lambda n: engine.generate([[n], [n + 10]], **GREEDY), range(batches)))
    assert [[one.ids for one in answer] for answer in answers] == [[[n], [n + 10]] for n in range(batches)]


def test_a_batch_goes_to_the_idlest_and_an_error_that_is_no_death_is_passed_on():
    class Busy(Played):
        def capture(self, batch):
            self.calls += 1
            if batch == [[13]]:
                raise EngineError("bad luck")
            assert release.wait(20)
            return [self.servers.name]

    release, first, second = threading.Event(), Busy(0, 9), Busy(1, 9)
    engine = Replicas([first, second])
    threads = [threading.Thread(target=engine.capture, args=([[1] * 8],))]
    threads += [threading.Thread(target=engine.capture, args=([[1]],)) for _ in range(3)]
    for number, thread in enumerate(threads):
        thread.start()
        while first.calls + second.calls <= number:
            threading.Event().wait(0.001)
    assert (first.calls, second.calls) == (1, 3), "3 short ones are less than a long one"
    with pytest.raises(EngineError, match="bad luck"):
        engine.capture([[13]])
    release.set()
    for thread in threads:
        thread.join()
    assert engine._under_way == [0, 0] and not engine.lost


def server_with(env, *overrides, count=2):
    told = [f"server.env.{key}={value!r}" for key, value in env.items()]
    return config("server=sglang", f"server.replicas={count}", *told, *overrides, script="extract").server


@pytest.mark.parametrize(
    ("visible", "flags", "given_"),
    [
        ("0,1", (), ["0", "1"]),
        ("4,5,6,7", ("server.flags.tp_size=2",), ["4,5", "6,7"]),
        ("3,1,GPU-8f6c,0,5", ("server.flags.tp_size=2",), ["3,1", "GPU-8f6c,0"]),
        ("0,1,2,3,4,5,6,7", ("server.flags.tp_size=2", "server.flags.dp_size=2"), ["0,1,2,3", "4,5,6,7"]),
        ("0,1,2,3", ("server.flags.tp_size=2", "+server.capture.flags.tp_size=1"), ["0,1", "2,3"]),
    ],
)
@pytest.mark.parametrize("where", ["server", "hardware", "shell"])
def test_each_gets_gpus_of_its_own_out_of_those_that_are_visible(monkeypatch, visible, flags, given_, where):
    told = {"CUDA_VISIBLE_DEVICES": visible}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible if where == "shell" else "99")
    made = replicas_of(server_with(told if where == "server" else {}, *flags), told if where == "hardware" else {})
    assert [one.env["CUDA_VISIBLE_DEVICES"] for one in made] == given_


@pytest.mark.parametrize(
    ("visible", "flags", "words"),
    [
        (
            "0,1,2",
            ("server.flags.tp_size=2",),
            r"server.replicas=2 of 2 GPUs each need 4, and 3 are visible \(0,1,2\)",
        ),
        ("0,-1,1", (), r"need 2, and 1 are visible \(0\)"),
        ("", (), r"need 2, and 0 are visible \(none\)"),
        ("0,1", ("server.flags.base_gpu_id=1",), "server.flags.base_gpu_id contradicts server.replicas=2"),
    ],
)
def test_too_few_gpus_are_told_before_anything_starts(visible, flags, words):
    with pytest.raises(ValueError, match=words):
        replicas_of(server_with({"CUDA_VISIBLE_DEVICES": visible}, *flags), {})


def test_without_the_variable_the_server_s_own_torch_counts_them(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    site = installed(tmp_path / "site")
    (site / "torch.py").write_text("class cuda:\n    device_count = staticmethod(lambda: 4)\n")
    server = fake_server(site, tmp_path, replicas=2, flags={"tp-size": 2})
    assert [one.env["CUDA_VISIBLE_DEVICES"] for one in replicas_of(server, {})] == ["0,1", "2,3"]


def test_a_single_server_and_those_on_a_cpu_are_left_as_they_are(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (one,) = replicas_of(server_with({}, count=1), {})
    assert "CUDA_VISIBLE_DEVICES" not in one.env
    cpu = replicas_of(server_with({}, "server.flags.device=cpu", count=3), {})
    assert len(cpu) == 3 and all(one.env == {} for one in cpu)


def test_a_plan_shows_every_command_and_hands_over_more_batches(tmp_path):
    server = fake_server(installed(tmp_path / "site"), tmp_path, replicas=2)
    fleet = plan_fleet(SPEC, server, capture_layers=LAYERS, dtype="float32", log_dir=tmp_path,
                       env={"CUDA_VISIBLE_DEVICES": "6,7"})  # fmt: skip
    assert fleet.ahead == 4 and fleet.version == "0.5.23"
    assert ["CUDA_VISIBLE_DEVICES=6 " in line for line in fleet.commands] == [True, True, False, False]
    assert ["CUDA_VISIBLE_DEVICES=7 " in line for line in fleet.commands] == [False, False, True, True]


def test_engines_that_are_not_sglang_take_no_replicas_and_no_urls():
    for told in ("server.replicas=2", "server.urls=[http://127.0.0.1:1]"):
        with pytest.raises(ConfigError, match=r"server\.engine=inprocess takes no server\.(replicas|urls)"):
            config(told, script="extract")


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (("server.replicas=2",), r"contradicts server\.replicas"),
        (("server.flags.tp_size=2", "server.env.A=1"), r"contradicts server\.flags, server\.env"),
        (("+server.capture.flags.tp_size=2",), r"contradicts server\.capture\.flags"),
        (("server.urls=[http://a:1,http://a:1]",), "names a server twice"),
        (("server.urls=[a:1]",), r"server\.urls"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(told, words):
    with pytest.raises(ConfigError, match=words):
        config("server=sglang", "server.urls=[http://127.0.0.1:1]", *told, script="extract")


def test_what_succeeded_in_one_share_of_a_batch_stays_when_another_fails():
    done, partly = Future(), Future()
    done.set_result([1, 2])
    partly.set_exception(SomeFailed([EngineError("no"), 4]))
    with pytest.raises(SomeFailed) as failed:
        joined([done, partly])
    assert [str(r) if isinstance(r, EngineError) else r for r in failed.value.results] == [1, 2, "no", 4]
    partly = Future()
    partly.set_exception(EngineGone("all are lost"))
    with pytest.raises(EngineGone):
        joined([done, partly])
