"""The writer waits for no disk, up to its bound; what goes wrong in its threads is told, and nothing is lost."""

import errno
import json
import os
import signal
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny_store import assert_holds, in_child, manifest, samples, write_store

from extract.store import StoreFull, create_or_resume, open_store, verify
from extract.store_queue import AT_ONCE

WHAT = samples([5] * 12)
A_SAMPLE = 5 * (2 * 4 * 8 + 5)
"""Bytes: a shard of so many holds one sample."""
REAL = os.fsync


def name_of(handle: int) -> str:
    return Path(f"/proc/self/fd/{handle}").readlink().name


@contextmanager
def closed_gate(monkeypatch, *, only=""):
    """No fsync of a shard's file, or of the one whose name begins with `only`, ends before the gate is opened."""
    gate = threading.Event()

    def waits(handle: int) -> None:
        name = name_of(handle)
        if name.startswith(only) and name.endswith(".safetensors.tmp"):
            assert gate.wait(20)
        REAL(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", waits)
        try:
            yield gate
        finally:
            gate.set()


def indexed(path) -> list[str]:
    lines = (path / "index.jsonl").read_text().splitlines() if (path / "index.jsonl").exists() else []
    return [one["id"] for line in lines for one in json.loads(line)["samples"]]


def test_two_shards_are_under_way_a_third_waits_and_none_is_acknowledged_before_its_fsync(tmp_path, monkeypatch):
    with (
        create_or_resume(tmp_path, manifest(), shard_bytes=A_SAMPLE) as writer,
        closed_gate(monkeypatch) as gate,
    ):
        for one in WHAT[:AT_ONCE]:
            writer.add(one)  # returns though nothing can reach the disk
        assert writer.done == set() and indexed(tmp_path) == []
        added = threading.Event()

        def third() -> None:
            writer.add(WHAT[2])
            added.set()

        thread = threading.Thread(target=third)
        thread.start()
        assert not added.wait(0.3), "a third full shard must wait, or memory has no bound"
        gate.set()
        thread.join(20)
        assert added.is_set() and "s0" in writer.done
        writer.flush()
        assert writer.done == {"s0", "s1", "s2"} == set(indexed(tmp_path))


def test_a_shard_gets_neither_name_nor_line_before_the_one_in_front_of_it(tmp_path, monkeypatch):
    with create_or_resume(tmp_path, manifest(), shard_bytes=A_SAMPLE) as writer:
        with closed_gate(monkeypatch, only="00000"):
            writer.add(WHAT[0])
            writer.add(WHAT[1])
            ready = tmp_path / "shards" / "00001.safetensors.tmp"
            for _ in range(200):
                if ready.exists() and ready.stat().st_size > A_SAMPLE:
                    break
                threading.Event().wait(0.01)
            threading.Event().wait(0.1)
            assert [file.name for file in (tmp_path / "shards").glob("*.safetensors")] == []
            assert indexed(tmp_path) == []
        writer.flush()
        assert indexed(tmp_path) == ["s0", "s1"]


def failing(monkeypatch, error: OSError, fragment: str):
    """From now on the fsync of files whose name contains `fragment` fails."""

    def fails(handle: int) -> None:
        if fragment in name_of(handle):
            raise error
        REAL(handle)

    monkeypatch.setattr(os, "fsync", fails)


FAULTS = {
    "full": (OSError(errno.ENOSPC, "No space left on device"), StoreFull, r"00000\.safetensors: no room .* needed"),
    "broken": (OSError(errno.EIO, "Input/output error"), OSError, "Input/output error"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("where", ["00000.safetensors", "index.jsonl"])
@pytest.mark.parametrize("call", ["add", "flush", "finish", "close"])
def test_what_went_wrong_in_a_thread_is_raised_by_the_next_call_and_may_be_tried_again(
    tmp_path, monkeypatch, call, where, fault
):
    error, kind, words = FAULTS[fault]
    writer = create_or_resume(tmp_path, manifest(), shard_bytes=A_SAMPLE)
    with monkeypatch.context() as patch:
        failing(patch, error, where)
        writer.add(WHAT[0])
        if call == "add":
            writer._queue._waiting[0][1].exception(20)  # it has failed; only the call tells
        with pytest.raises(kind, match=words):
            {"add": lambda: writer.add(WHAT[1]), "flush": writer.flush, "close": writer.close,
             "finish": lambda: writer.finish(["s0"])}[call]()  # fmt: skip
        assert writer.done == set() and indexed(tmp_path) == []
        assert not list((tmp_path / "shards").iterdir())
    if call == "close":
        writer.close()
        write_store(tmp_path, WHAT, shard_bytes=A_SAMPLE)
    else:
        for one in WHAT[1:]:
            writer.add(one)
        writer.finish([one.id for one in WHAT])
        writer.close()
    assert [ref.id for ref in open_store(tmp_path, need_complete=True).samples] == [one.id for one in WHAT]
    assert_holds(open_store(tmp_path), WHAT)
    assert verify(tmp_path).faults == []


def test_a_shard_behind_one_that_failed_is_not_written_before_it(tmp_path, monkeypatch):
    with create_or_resume(tmp_path, manifest(), shard_bytes=A_SAMPLE) as writer:
        with monkeypatch.context() as patch:
            failing(patch, OSError(errno.ENOSPC, "No space left on device"), "00000.safetensors.tmp")
            with pytest.raises(StoreFull, match="00000"):
                for one in WHAT[:2]:
                    writer.add(one)
                writer.flush()
            with pytest.raises(StoreFull, match="00000"):
                writer.flush()
            assert not list((tmp_path / "shards").iterdir()) and writer.done == set()
        writer.flush()
        assert indexed(tmp_path)[0] == "s0" and writer.done >= {"s0"}


def test_no_second_writer_comes_in_while_a_thread_still_writes(tmp_path, monkeypatch):
    writer = create_or_resume(tmp_path, manifest(), shard_bytes=A_SAMPLE)
    with closed_gate(monkeypatch) as gate:
        writer.add(WHAT[0])
        closing = threading.Thread(target=writer.__exit__, args=(StoreFull, None, None))  # flushes nothing
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()
        with pytest.raises(ValueError, match="another process"):
            create_or_resume(tmp_path, manifest(), shard_bytes=A_SAMPLE)
        gate.set()
        closing.join(20)
    with create_or_resume(tmp_path, manifest(), shard_bytes=A_SAMPLE) as again:
        assert again.done == {"s0"}


def test_ctrl_c_loses_nothing_that_was_taken(tmp_path):
    def work() -> None:
        slow = threading.Event()
        os.fsync = lambda handle: (slow.wait(0.05), REAL(handle))[1]
        with pytest.raises(KeyboardInterrupt), create_or_resume(tmp_path, manifest(), shard_bytes=A_SAMPLE) as writer:
            for number, one in enumerate(WHAT):
                if number == 6:
                    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
                writer.add(one)

    assert in_child(work) == 0
    stored = [ref.id for ref in open_store(tmp_path).samples]
    assert stored == [one.id for one in WHAT[: len(stored)]] and len(stored) >= 6
    assert verify(tmp_path).faults == []
    write_store(tmp_path, WHAT, shard_bytes=A_SAMPLE)
    assert_holds(open_store(tmp_path, need_complete=True), WHAT)
