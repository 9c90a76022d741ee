"""What stores live through: damaged files, torn lines, full disks, a second writer."""

import errno
import itertools
import os
import resource
import signal
import struct
import subprocess

import pytest
from tiny_store import assert_holds, in_child, manifest, sample, samples, write_store

from extract.store import StoreFull, create_or_resume, open_store, verify

LENGTHS = [5, 9, 4, 12, 7, 3, 8]
SHARD_BYTES = 1000
WHAT = samples(LENGTHS)


def cut_to(size: int):
    return lambda raw: raw[:size]


DAMAGE = {
    "empty": cut_to(0),
    "seven bytes": cut_to(7),
    "header length 0": lambda raw: struct.pack("<Q", 0) + raw[8:],
    "header length huge": lambda raw: struct.pack("<Q", 1 << 62) + raw[8:],
    "last 10 bytes missing": lambda raw: raw[:-10],
    "10 extra bytes": lambda raw: raw + b"0123456789",
    "header is no JSON": lambda raw: raw[:8] + b"\xff" + raw[9:],
    "header of another shape": lambda raw: raw.replace(b'"aux"', b'"AUX"', 1),
    "one bit": lambda raw: raw[:-100] + bytes([raw[-100] ^ 1]) + raw[-99:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_shard_is_named_set_aside_and_made_again(tmp_path, damage, caplog):
    write_store(tmp_path, WHAT, shard_bytes=SHARD_BYTES)
    lost = {ref.id for ref in open_store(tmp_path).samples if ref.shard == 1}
    shard = tmp_path / "shards" / "00001.safetensors"
    shard.write_bytes(DAMAGE[damage](shard.read_bytes()))
    assert any(str(shard) in fault for fault in verify(tmp_path).faults)
    if damage != "one bit":  # found by its hash only
        with pytest.raises(ValueError, match=str(shard)):
            open_store(tmp_path)
    with create_or_resume(tmp_path, manifest(), shard_bytes=SHARD_BYTES) as writer:
        assert writer.done == {one.id for one in WHAT} - lost
        assert len(writer.set_aside) == 1 and str(shard) in writer.set_aside[0]
    assert str(shard) in caplog.text
    assert not shard.exists() and shard.with_name(shard.name + ".bad").exists()
    with pytest.raises(ValueError, match="interrupted"):
        open_store(tmp_path, need_complete=True)
    write_store(tmp_path, WHAT, shard_bytes=SHARD_BYTES)
    assert_holds(open_store(tmp_path, need_complete=True), WHAT)
    assert verify(tmp_path).faults == []


def test_an_alteration_that_hides_its_time_is_found_by_verify(tmp_path):
    write_store(tmp_path, WHAT, shard_bytes=SHARD_BYTES)
    shard = tmp_path / "shards" / "00000.safetensors"
    about = shard.stat()
    shard.write_bytes(DAMAGE["one bit"](shard.read_bytes()))
    os.utime(shard, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert verify(tmp_path).faults == [f"{shard} was altered: its sha256 is not that of index.jsonl"]


def test_a_missing_shard_and_one_without_a_line(tmp_path):
    write_store(tmp_path, WHAT, shard_bytes=SHARD_BYTES)
    shards = tmp_path / "shards"
    (shards / "00000.safetensors").replace(shards / "00077.safetensors")
    assert {"is missing", "has no line in index.jsonl"} <= {f.split(" ", 1)[1] for f in verify(tmp_path).faults}
    write_store(tmp_path, WHAT, shard_bytes=SHARD_BYTES)
    assert_holds(open_store(tmp_path), WHAT)
    assert (shards / "00077.safetensors.bad").exists() and (shards / "00078.safetensors").exists()


def test_an_index_torn_at_any_byte_of_its_last_line(tmp_path):
    write_store(tmp_path / "whole", WHAT, shard_bytes=SHARD_BYTES)
    raw = (tmp_path / "whole" / "index.jsonl").read_bytes()
    begin = raw.rindex(b"\n", 0, -1) + 1
    first = {one.id for one in WHAT} - {
        ref.id for ref in open_store(tmp_path / "whole").samples if ref.shard == raw.count(b"\n") - 1
    }
    for end in [*range(begin, len(raw) - 1, 37), len(raw) - 2, len(raw) - 1]:
        path = tmp_path / f"torn{end}"
        write_store(path, WHAT, shard_bytes=SHARD_BYTES)
        (path / "index.jsonl").write_bytes((path / "index.jsonl").read_bytes()[:end])
        with create_or_resume(path, manifest(), shard_bytes=SHARD_BYTES) as writer:
            # Only the line's end is missing in the last case: then the line is whole, and so is its shard.
            assert writer.done == (first if end < len(raw) - 1 else {one.id for one in WHAT})
        assert (path / "index.torn").exists() == (begin < end < len(raw) - 1)
        write_store(path, WHAT, shard_bytes=SHARD_BYTES)
        assert_holds(open_store(path), WHAT)


def test_damage_in_the_middle_of_the_index(tmp_path):
    write_store(tmp_path, WHAT, shard_bytes=SHARD_BYTES)
    index = tmp_path / "index.jsonl"
    lines = index.read_bytes().split(b"\n")
    index.write_bytes(b"\n".join([lines[0], lines[1][:50] + b"\x00\xff" + lines[1][52:], *lines[2:]]))
    assert verify(tmp_path).faults
    with pytest.raises(ValueError, match="unreadable line"):
        open_store(tmp_path)
    write_store(tmp_path, WHAT, shard_bytes=SHARD_BYTES)
    assert_holds(open_store(tmp_path), WHAT)
    assert verify(tmp_path).faults == []


def test_unicode_line_ends_split_no_record(tmp_path):
    reason = "first\u2028second\u2029third\u0085fourth\r\nfifth\x0b\x1c"
    with create_or_resume(tmp_path, manifest(), shard_bytes=SHARD_BYTES) as writer:
        writer.quarantine("odd\u2028id", reason)
        writer.quarantine("plain", "cut")
    raw = (tmp_path / "quarantine.jsonl").read_bytes()
    (tmp_path / "quarantine.jsonl").write_bytes(raw.replace(b"\n", b"\r\n"))
    with create_or_resume(tmp_path, manifest(), shard_bytes=SHARD_BYTES) as writer:
        assert writer.quarantined == {"odd\u2028id": reason, "plain": "cut"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", range(8))
def test_a_disk_that_fills_at_any_fsync_stops_cleanly_and_goes_on(tmp_path, monkeypatch, call, number):
    counter, real = itertools.count(), os.fsync

    def full(handle: int) -> None:
        if next(counter) >= call:
            raise OSError(number, os.strerror(number))
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreFull, match=rf"{tmp_path}.*{os.strerror(number)}.* needed, .* free"):
            write_store(tmp_path, WHAT, shard_bytes=SHARD_BYTES)
    assert not list(tmp_path.glob("shards/*.tmp"))
    write_store(tmp_path, WHAT, shard_bytes=SHARD_BYTES)
    assert_holds(open_store(tmp_path, need_complete=True), WHAT)
    assert verify(tmp_path).faults == []


def test_flush_may_be_tried_again_when_space_was_freed(tmp_path, monkeypatch):
    with create_or_resume(tmp_path, manifest(), shard_bytes=1 << 20) as writer:
        for one in WHAT:
            writer.add(one)
        with monkeypatch.context() as patch:
            patch.setattr("extract.store_space.free_bytes", lambda path: 1000)
            with pytest.raises(StoreFull, match="1000 B free"):
                writer.flush()
        assert not list((tmp_path / "shards").iterdir())
    assert_holds(open_store(tmp_path), WHAT)


def test_file_size_limit(tmp_path):
    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        with (
            pytest.raises(StoreFull, match="File too large"),
            create_or_resume(tmp_path, manifest(), shard_bytes=1 << 20) as writer,
        ):
            writer.add(sample(0, 5))
            writer.flush()
            writer.add(sample(1, 2000))
            writer.flush()

    assert in_child(work) == 0
    assert [file.name for file in (tmp_path / "shards").iterdir()] == ["00000.safetensors"]
    write_store(tmp_path, [sample(0, 5), sample(1, 2000)], shard_bytes=1 << 20)


def test_full_tmpfs(tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not permitted here; the other tests of full disks need no mount")
    try:
        what = [sample(number, 500) for number in range(20)]
        hog = tmp_path / "hog"
        hog.write_bytes(bytes(100_000))
        with pytest.raises(StoreFull, match=rf"{tmp_path}/store/shards/000.*needed.*free"):
            write_store(tmp_path / "store", what, shard_bytes=64_000)
        stored = {ref.id for ref in open_store(tmp_path / "store").samples}
        assert 0 < len(stored) < 20 and verify(tmp_path / "store").faults == []
        hog.unlink()
        fitting = what[: len(stored) + 2]
        write_store(tmp_path / "store", fitting, shard_bytes=64_000)
        assert_holds(open_store(tmp_path / "store", need_complete=True), fitting)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_two_writers_are_refused_and_a_dead_one_leaves_no_lock(tmp_path):
    with create_or_resume(tmp_path, manifest(), shard_bytes=SHARD_BYTES) as writer:
        writer.add(WHAT[0])
        with pytest.raises(ValueError, match="another process"):
            create_or_resume(tmp_path, manifest(), shard_bytes=SHARD_BYTES)

        def second() -> None:
            with pytest.raises(ValueError, match="another process"):
                create_or_resume(tmp_path, manifest(max_len=1), shard_bytes=SHARD_BYTES)

        assert in_child(second) == 0

    def dies() -> None:
        create_or_resume(tmp_path, manifest(), shard_bytes=SHARD_BYTES)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(dies) == -signal.SIGKILL
    write_store(tmp_path, WHAT, shard_bytes=SHARD_BYTES)
    assert_holds(open_store(tmp_path), WHAT)


def test_a_store_that_lost_its_manifest_is_not_written_over(tmp_path):
    write_store(tmp_path, WHAT, shard_bytes=SHARD_BYTES)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match="restore it"):
        create_or_resume(tmp_path, manifest(), shard_bytes=SHARD_BYTES)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="unreadable"):
        create_or_resume(tmp_path, manifest(), shard_bytes=SHARD_BYTES)


def test_a_shard_half_written_by_another_program_is_not_read(tmp_path):
    write_store(tmp_path, WHAT, shard_bytes=SHARD_BYTES)
    whole = (tmp_path / "shards" / "00000.safetensors").read_bytes()
    (tmp_path / "shards" / "00009.safetensors.tmp").write_bytes(whole[: len(whole) // 2])
    assert_holds(open_store(tmp_path), WHAT)
    assert verify(tmp_path).faults == []
