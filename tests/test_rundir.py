import json
import multiprocessing
import os
import signal

import pytest

from extract.rundir import open_run, saved_run

CONFIG = {"name": "a", "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]}, "tracking": {"mode": "offline"}, "seed": 0}
INPUTS = {"store": "abc"}


def opened(path, *, config=CONFIG, inputs=INPUTS, stage="train", told=1, intact=True, renews=False):
    return open_run(path, stage, config, inputs, {"told": told}, intact=intact, renews=renews)


def read(path):
    return json.loads(path.read_text())


def finish(path, **options):
    with opened(path, **options) as run:
        run.finish({"accept_len": 1.5})


def test_a_new_run_is_told_in_full_before_any_work(tmp_path):
    path = tmp_path / "deep" / "run"
    with opened(path) as run:
        assert (run.state, run.attempt) == ("new", 1)
        told = {"stage": "train", "config": CONFIG, "inputs": INPUTS, "attempts": [{"told": 1}]}
        assert read(path / "run.json") == told
        assert read(path / "status.json") == {"status": "running", "attempt": 1}
        assert not (path / "summary.json").exists()
    assert saved_run(path) == told


def test_a_finished_run_is_reused_and_left_as_it_is(tmp_path):
    finish(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with opened(tmp_path, told=2) as run:
        assert run.state == "finished"
        assert run.summary() == {"accept_len": 1.5}
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_an_error_while_a_finished_run_is_shown_does_not_unfinish_it(tmp_path):
    finish(tmp_path)
    with pytest.raises(KeyError), opened(tmp_path):
        raise KeyError("a table")
    assert read(tmp_path / "status.json")["status"] == "finished"
    assert not (tmp_path / "traceback.txt").exists()


def test_a_finished_run_whose_result_is_gone_is_unfinished(tmp_path):
    finish(tmp_path)
    with opened(tmp_path, told=2, intact=False) as run:
        assert (run.state, run.attempt) == ("unfinished", 2)
    assert read(tmp_path / "run.json")["attempts"] == [{"told": 1}, {"told": 2}]


def test_a_stage_that_renews_is_made_again_from_other_inputs(tmp_path):
    finish(tmp_path, renews=True)
    with opened(tmp_path, renews=True) as run:
        assert run.state == "finished"
    with opened(tmp_path, renews=True, inputs={"store": "other"}) as run:
        assert (run.state, run.attempt) == ("unfinished", 2)
        run.finish({"accept_len": 2.0})
    assert read(tmp_path / "run.json")["inputs"] == {"store": "other"}
    with pytest.raises(ValueError, match="input store"), opened(tmp_path):
        pass


def test_a_failed_run_leaves_its_traceback_and_goes_on_next_time(tmp_path):
    with pytest.raises(RuntimeError), opened(tmp_path):
        raise RuntimeError("out of\nluck")
    reason = "RuntimeError: out of\nluck"
    assert read(tmp_path / "status.json") == {"status": "failed", "attempt": 1, "reason": reason}
    trace = (tmp_path / "traceback.txt").read_text()
    assert "Traceback" in trace and "test_rundir.py" in trace and "out of" in trace
    with opened(tmp_path) as run:
        assert (run.state, run.attempt) == ("unfinished", 2)
        assert not (tmp_path / "traceback.txt").exists()
        run.finish({})
    assert read(tmp_path / "status.json") == {"status": "finished", "attempt": 2}


def test_ctrl_c_is_recorded_too(tmp_path):
    with pytest.raises(KeyboardInterrupt), opened(tmp_path):
        raise KeyboardInterrupt
    assert read(tmp_path / "status.json")["status"] == "failed"


def test_a_run_that_died_between_summary_and_status_is_not_finished(tmp_path):
    with opened(tmp_path):
        (tmp_path / "summary.json").write_text("{}")
    with opened(tmp_path) as run:
        assert run.state == "unfinished"


def test_another_config_is_refused_with_every_key_that_differs(tmp_path):
    finish(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    other = {**CONFIG, "optimizer": {"lr": 3e-4, "betas": [0.9, 0.999], "eps": 1e-8}}
    with pytest.raises(ValueError) as caught, opened(tmp_path, config=other, inputs={"store": "xyz"}):
        raise AssertionError("it was opened")
    assert str(caught.value).splitlines() == [
        f"{tmp_path} belongs to another run:",
        "  input store: abc there, xyz now",
        "  optimizer.betas: [0.9, 0.95] there, [0.9, 0.999] now",
        "  optimizer.eps: absent there, 1e-08 now",
        "  optimizer.lr: 0.001 there, 0.0003 now",
        "Remove that directory, or choose another with hydra.run.dir=DIR (or another name=NAME).",
    ]
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_another_stage_is_refused(tmp_path):
    finish(tmp_path)
    with pytest.raises(ValueError, match="stage: train there, evaluate now"), opened(tmp_path, stage="evaluate"):
        raise AssertionError("it was opened")


def test_settings_that_no_result_depends_on_may_change(tmp_path):
    finish(tmp_path)
    other = {**CONFIG, "name": "b", "tracking": {"mode": "online"}, "cache_dir": "elsewhere", "dry_run": False}
    with opened(tmp_path, config=other) as run:
        assert run.state == "finished"


def test_sections_that_the_stage_does_not_depend_on_may_change(tmp_path):
    finish(tmp_path)
    other = {**CONFIG, "optimizer": {"lr": 1.0}}
    with open_run(tmp_path, "train", other, INPUTS, {}, depends_on=("seed", "name")) as run:
        assert run.state == "finished"
    with (
        pytest.raises(ValueError, match="seed: 0 there, 1 now"),
        open_run(tmp_path, "train", {**CONFIG, "seed": 1}, INPUTS, {}, depends_on=("seed", "name")),
    ):
        raise AssertionError("it was opened")


def test_a_directory_that_is_no_run_is_named(tmp_path):
    for path, told in ((tmp_path / "nowhere", "is no directory"), (tmp_path, "holds no run.json")):
        with pytest.raises(ValueError, match=f"{path} {told}; give the run directory of a training"):
            saved_run(path)
    for content in ("{", "[]", "{}"):
        (tmp_path / "run.json").write_text(content)
        told = r"(/run.json (cannot be read|is no JSON object)| is no run directory: run.json lacks stage, config)"
        with pytest.raises(ValueError, match=f"{tmp_path}{told}.*restore it, or remove"):
            saved_run(tmp_path)


def _hold(path, held, killed):
    with opened(path):
        held.set()
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()


@pytest.mark.parametrize("killed", [False, True])
def test_two_processes_never_share_a_directory_and_a_dead_one_holds_nothing(tmp_path, killed):
    fork = multiprocessing.get_context("fork")
    held = fork.Event()
    other = fork.Process(target=_hold, args=(tmp_path, held, killed))
    other.start()
    try:
        assert held.wait(30)
        if killed:
            other.join()
            with opened(tmp_path) as run:
                assert (run.state, run.attempt) == ("unfinished", 2)
            return
        before = (tmp_path / "run.json").read_bytes()
        with pytest.raises(ValueError, match=f"another process is working in {tmp_path}"), opened(tmp_path):
            raise AssertionError("it was opened")
        assert (tmp_path / "run.json").read_bytes() == before
    finally:
        other.kill()
        other.join()
