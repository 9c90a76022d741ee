"""kill -9 at every step of writing, and at any moment: the acknowledged is there, the rest is made again."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tiny_store import assert_holds, in_child, manifest, sample, samples, write_store

import extract.store_tensors
from extract.store import create_or_resume, open_store, verify

ROOT = Path(__file__).parent.parent
SHARD_BYTES = 1000
WHAT = samples([5, 9, 4, 12])


def die_at(event: int) -> None:
    """Kill this process just before or just after its n-th write of a block, fsync, rename or unlink."""
    counter = itertools.count()

    def deadly(function):
        def wrapped(*arguments, **named):
            if next(counter) == event:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*arguments, **named)
            if next(counter) == event:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    blocks = extract.store_tensors._blocks

    def deadly_blocks(pieces):
        for block in blocks(pieces):
            yield deadly(lambda block=block: block)()

    extract.store_tensors._blocks = deadly_blocks
    os.fsync, os.replace, os.unlink = deadly(os.fsync), deadly(os.replace), deadly(os.unlink)


def write_and_die(path: Path, event: int) -> bool:
    """Write the store in a process that dies at `event`; whether it died. <path>.acked: ids acknowledged."""

    def work() -> None:
        die_at(event)
        with (
            create_or_resume(path, manifest(), shard_bytes=SHARD_BYTES) as writer,
            path.with_suffix(".acked").open("a", buffering=1) as acked,
        ):
            for one in WHAT:
                if one.id not in writer.done:
                    writer.add(one)
                    acked.write("".join(f"{id}\n" for id in sorted(writer.done)))
            writer.finish([one.id for one in WHAT])

    return in_child(work) == -signal.SIGKILL


def test_kill_9_at_every_step_of_writing_loses_nothing_acknowledged(tmp_path):
    write_store(tmp_path / "whole", WHAT, shard_bytes=SHARD_BYTES)
    lines = [json.loads(line) for line in (tmp_path / "whole" / "index.jsonl").read_text().splitlines()]
    per_shard = [[one["id"] for one in line["samples"]] for line in lines]
    assert len(per_shard) >= 3
    for event in itertools.count():
        path = tmp_path / f"killed{event}"
        if not write_and_die(path, event):
            break
        acked = set(path.with_suffix(".acked").read_text().split()) if path.with_suffix(".acked").exists() else set()
        with create_or_resume(path, manifest(), shard_bytes=SHARD_BYTES) as writer:
            assert acked <= writer.done
            assert writer.done in [set(itertools.chain(*per_shard[:n])) for n in range(len(per_shard) + 1)]
        write_store(path, WHAT, shard_bytes=SHARD_BYTES)
        assert_holds(open_store(path, need_complete=True), WHAT)
        assert verify(path).faults == []
        again = [json.loads(line) for line in (path / "index.jsonl").read_text().splitlines()]
        assert [[one["id"] for one in line["samples"]] for line in again] == per_shard
        assert not list(path.rglob("*.tmp"))
    assert event > 40, "the sweep must have gone through every step"


def test_kill_9_during_resume_after_damage(tmp_path):
    for event in itertools.count():
        path = tmp_path / f"store{event}"
        write_store(path, WHAT, shard_bytes=SHARD_BYTES)
        (path / "shards" / "00001.safetensors").write_bytes(b"cut")
        died = write_and_die(path, event)
        write_store(path, WHAT, shard_bytes=SHARD_BYTES)
        assert_holds(open_store(path, need_complete=True), WHAT)
        assert verify(path).faults == []
        if not died:
            break
    assert event > 10


WRITER = """
import sys
from tiny_store import create_or_resume, manifest, sample
from pathlib import Path
with create_or_resume(Path(sys.argv[1]), manifest(), shard_bytes=40_000) as writer:
    for number in range(100_000):
        if f"s{number}" not in writer.done:
            writer.add(sample(number, 60))
        if number % 10 == 0:
            print(len(writer.done), flush=True)
"""


def test_kill_9_from_outside_at_any_moment(tmp_path):
    path, seen = tmp_path / "store", 0
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    for pause_s in (0.0, 0.013, 0.031):
        command = [sys.executable, "-c", WRITER, str(path)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            while (acknowledged := int(process.stdout.readline())) < seen + 50:
                pass
            time.sleep(pause_s)
            process.kill()
        with create_or_resume(path, manifest(), shard_bytes=40_000) as writer:
            assert len(writer.done) >= acknowledged > seen
            seen = len(writer.done)
        assert verify(path).faults == []
    assert_holds(open_store(path), [sample(number, 60) for number in range(seen)])
