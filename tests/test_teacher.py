"""The teacher pass: exact numbers, bounded memory, nothing finished done again, nothing stale kept."""

import itertools
import os
import signal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_store import HIDDEN, in_child, samples, write_store

import extract.teacher
from extract.store import StoreFull, open_store, verify
from extract.teacher import teach, teacher_pass

VOCAB = 300
WHAT = samples([5, 9, 4, 12, 7, 3])


def head(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(path, weights: torch.Tensor, chunk_tokens: int = 4) -> list:
    return list(teacher_pass(path, weights, device="cpu", chunk_tokens=chunk_tokens))


@settings(max_examples=30, deadline=None)
@given(vocab=st.integers(1, 50), block=st.integers(1, 20), tokens=st.integers(1, 9), seed=st.integers(0, 999))
def test_any_vocabulary_block_gives_the_same_answer(vocab, block, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    last = torch.randint(-2, 3, (tokens, 4), generator=generator).float()
    weights = torch.randint(-2, 3, (vocab, 4), generator=generator).float()  # small integers: many equal logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extract.teacher, "VOCAB_BLOCK", block)
        top1, lse = teach(last, weights)
    logits = last @ weights.T
    assert top1.tolist() == logits.argmax(dim=1).tolist()
    torch.testing.assert_close(lse, logits.double().logsumexp(dim=1).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_pass_says_what_the_head_says(tmp_path, dtype):
    write_store(tmp_path, WHAT)
    weights = head(dtype=dtype)
    assert not open_store(tmp_path).has_teacher
    with pytest.raises(ValueError, match="teacher pass has not finished"):
        open_store(tmp_path, need_teacher=True)
    events = run(tmp_path, weights)
    assert sum(event.tokens for event in events) == sum(len(one.input_ids) for one in WHAT)
    assert max(event.tokens for event in events) <= 4
    store = open_store(tmp_path, need_teacher=True)
    assert store.has_teacher and verify(tmp_path).faults == []
    for ref in store.samples:
        found = store.read(ref, ("top1", "lse", "last"))
        logits = (found["last"].to(dtype) @ weights.T).float()
        assert found["top1"].dtype == torch.int32 and found["lse"].dtype == torch.float32
        assert found["top1"].tolist() == logits.argmax(dim=1).tolist()
        torch.testing.assert_close(found["lse"], logits.logsumexp(dim=1))


def test_nothing_finished_is_done_again(tmp_path):
    write_store(tmp_path, WHAT, shard_bytes=600)
    begun = teacher_pass(tmp_path, head(), device="cpu", chunk_tokens=100)
    first, second = next(begun), next(begun)
    begun.close()
    assert not first.resumed and not second.resumed
    times = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.teacher.safetensors")}
    assert len(times) == 2
    events = run(tmp_path, head())
    assert [event.shard for event in events if event.resumed] == [first.shard, second.shard]
    assert {file: file.stat().st_mtime_ns for file in times} == times
    assert all(event.resumed for event in run(tmp_path, head()))


def test_kill_9_at_every_step(tmp_path):
    for event in itertools.count():
        path = tmp_path / f"store{event}"
        write_store(path, WHAT, shard_bytes=1000)

        def work(path=path, event=event) -> None:
            counter, fsync, replace = itertools.count(), os.fsync, os.replace

            def deadly(function, *arguments):
                if next(counter) == event:
                    os.kill(os.getpid(), signal.SIGKILL)
                function(*arguments)
                if next(counter) == event:
                    os.kill(os.getpid(), signal.SIGKILL)

            os.fsync, os.replace = lambda *a: deadly(fsync, *a), lambda *a: deadly(replace, *a)
            run(path, head())

        died = in_child(work) == -signal.SIGKILL
        run(path, head())
        assert open_store(path, need_teacher=True).has_teacher
        assert verify(path).faults == []
        assert not list(path.rglob("*.tmp"))
        if not died:
            break
    assert event > 10


def test_another_head_is_noticed(tmp_path, caplog):
    write_store(tmp_path, WHAT, shard_bytes=600)
    run(tmp_path, head(0))
    before = open_store(tmp_path).read((0, 0, 5), ("lse",))["lse"].clone()
    assert not any(event.resumed for event in run(tmp_path, head(1)))
    assert "another head" in caplog.text
    assert not torch.equal(open_store(tmp_path).read((0, 0, 5), ("lse",))["lse"], before)
    assert verify(tmp_path).faults == []
    with pytest.raises(ValueError, match="another verifier"):
        teacher_pass(tmp_path, torch.zeros(VOCAB, HIDDEN + 1), device="cpu", chunk_tokens=4)


def test_a_damaged_or_cut_teacher_file(tmp_path):
    write_store(tmp_path, WHAT, shard_bytes=600)
    run(tmp_path, head())
    file = tmp_path / "shards" / "00001.teacher.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
    assert verify(tmp_path).faults == [f"{file} was altered: its sha256 is not that of teacher.jsonl"]
    file.write_bytes(whole[:-3])
    with pytest.raises(ValueError, match="teacher pass"):
        open_store(tmp_path, need_teacher=True)
    run(tmp_path, head())
    assert verify(tmp_path).faults == []


def test_a_shard_made_again_gets_its_pass_again(tmp_path):
    write_store(tmp_path, WHAT, shard_bytes=600)
    run(tmp_path, head())
    (tmp_path / "shards" / "00001.safetensors").write_bytes(b"")
    write_store(tmp_path, WHAT, shard_bytes=600)
    assert not open_store(tmp_path).has_teacher
    assert (tmp_path / "shards" / "00001.teacher.safetensors.bad").exists()
    assert sum(not event.resumed for event in run(tmp_path, head(), chunk_tokens=1000)) == 1
    assert open_store(tmp_path).has_teacher and verify(tmp_path).faults == []


def test_a_full_disk_stops_it_cleanly(tmp_path, monkeypatch):
    write_store(tmp_path, WHAT, shard_bytes=600)
    with monkeypatch.context() as patch:
        patch.setattr("extract.store_space.free_bytes", lambda path: 3)
        with pytest.raises(StoreFull, match=r"00000.teacher.safetensors: no room .* 3 B free"):
            run(tmp_path, head())
    run(tmp_path, head())
    assert open_store(tmp_path).has_teacher


def test_a_store_that_is_being_written_is_refused(tmp_path):
    from extract.store_format import locked

    write_store(tmp_path, WHAT)
    with locked(tmp_path), pytest.raises(ValueError, match="another process"):
        run(tmp_path, head())
