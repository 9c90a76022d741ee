"""The controls: what they count, and that a drafter without use of the states does not beat them."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_drafter import LAYERS, PROMPTS, trained_drafter
from tiny_store import manifest, samples, write_store

from eagle3 import replayed
from eagle3.bootstrap import paired_difference
from eagle3.controls import bigram_counts, bigram_table, compare, control_counts
from eagle3.evaluate import Settings, evaluate
from eagle3.permuted import permuted_store
from eagle3.questions import FixedQuestions, Prompt
from extract.store import StoredSample, create_or_resume, open_store, verify
from extract.teacher import teacher_pass

HEAD = torch.randn(100, 8, generator=torch.Generator().manual_seed(1)).bfloat16()


def finished_store(path, lengths=(5, 7, 3, 9, 6)):
    write_store(path, samples(lengths), shard_bytes=700)
    list(teacher_pass(path, HEAD, device="cpu", chunk_tokens=16))
    return path


def text_store(path, texts):
    """Samples of (ids, mask) with states of no meaning."""
    about = manifest(dtype="float32")
    with create_or_resume(path, about, shard_bytes=1 << 20) as writer:
        for number, (ids, mask) in enumerate(texts):
            states = torch.zeros(len(ids), 32)
            aux, last = states[:, :24].clone(), states[:, 24:].clone()
            writer.add(StoredSample(f"s{number}", f"c{number}", 0.0, ids, mask, aux, last))
        writer.finish([f"s{number}" for number in range(len(texts))])
    return open_store(path)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1)), min_size=2, max_size=12), min_size=1, max_size=4)
)
def test_bigram_table_is_the_most_frequent_successor(tmp_path_factory, texts):
    texts = [([t for t, _ in text], [m for _, m in text]) for text in texts]
    store = text_store(tmp_path_factory.mktemp("store"), texts)
    table = bigram_table(store, store.samples, 6).tolist()
    successors = [Counter() for _ in range(6)]
    for ids, mask in texts:
        for t in range(len(ids) - 1):
            if mask[t] and mask[t + 1]:
                successors[ids[t]][ids[t + 1]] += 1
    expected = [min(c, key=lambda v: (-c[v], v)) if c else -1 for c in successors]
    assert table == expected


def test_bigram_counts_by_hand(model):
    """Response 5 6 7 5 6 9; the table knows 5→6, 6→7, 7→5. Row of 5: drafts 6 7 5, all right. Row of 6: 7, wrong."""
    text = replayed.capture(model, [1, 2], [5, 6, 7, 5, 6, 9], LAYERS)
    table = torch.full((320,), -1)
    table[[5, 6, 7]] = torch.tensor([6, 7, 5])
    plan = text.plan(trained_drafter(model, steps=1), 3)
    assert bigram_counts(table, text, plan) == (2, 3)


def test_permuted_store_is_the_same_but_for_the_owner_of_the_states(tmp_path):
    source = finished_store(tmp_path / "store")
    target = permuted_store(source, tmp_path / "permuted", seed=3)
    assert verify(target).faults == []
    before, after = open_store(source, need_teacher=True), open_store(target, need_teacher=True, need_complete=True)
    assert before.samples == after.samples and len({ref.shard for ref in before.samples}) > 1
    whole = {name: [] for name in ("before", "after")}
    for ref in before.samples:
        for name in ("last", "input_ids", "loss_mask", "top1", "lse"):
            assert torch.equal(before.read(ref, [name])[name], after.read(ref, [name])[name]), name
        whole["before"].append(before.read(ref, ["aux"])["aux"])
        whole["after"].append(after.read(ref, ["aux"])["aux"])
    old, new = torch.cat(whole["before"]), torch.cat(whole["after"])
    moved = (old != new).any(-1).float().mean()
    assert moved > 0.5, "most rows belong to another token"
    assert sorted(map(tuple, old.tolist())) == sorted(map(tuple, new.tolist())), "no row is lost or made up"


def test_permuted_store_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    source = finished_store(tmp_path / "store")
    whole = permuted_store(source, tmp_path / "whole", seed=3)
    from extract.store_writer import StoreWriter

    real, flushed = StoreWriter.flush, []

    def flush(self):
        if len(flushed) == 1:
            raise KeyboardInterrupt
        if self._open:
            flushed.append(1)
        real(self)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(StoreWriter, "flush", flush)
        permuted_store(source, tmp_path / "torn", seed=3)
    permuted_store(source, tmp_path / "torn", seed=3)
    permuted_store(source, tmp_path / "torn", seed=3)
    for name in ("index.jsonl", "teacher.jsonl"):
        torn = [line.split('"mtime_ns"')[0] for line in (tmp_path / "torn" / name).read_text().splitlines()]
        assert torn == [line.split('"mtime_ns"')[0] for line in (whole / name).read_text().splitlines()]
    with pytest.raises(ValueError, match="aux_permuted_seed: 3 -> 4"):
        permuted_store(source, tmp_path / "torn", seed=4)


def test_a_store_without_teacher_is_not_permuted(tmp_path):
    write_store(tmp_path / "store", samples((5, 4)))
    with pytest.raises(ValueError, match="teacher pass has not finished"):
        permuted_store(tmp_path / "store", tmp_path / "permuted", seed=0)


def test_a_drafter_beats_controls_that_know_nothing(model):
    drafter = trained_drafter(model)
    prompts = FixedQuestions(Prompt(f"p{i}", 0, tuple(ids)) for i, ids in enumerate(PROMPTS))
    report = evaluate(model, drafter, prompts, Settings(3, 24, frozenset(), 100, 0))
    nothing = torch.full((320,), -1)
    counts = control_counts(model, report.prompts, nothing, drafter, drafts=3, seed=0)
    assert all(accepted == 0 for _, accepted in counts["bigram"])
    for name in counts:
        assert [v for v, _ in counts[name]] == [v for v, _ in counts[name] if v > 0]
        found = compare(name, report.prompts, counts[name], resamples=500, seed=0)
        assert found.ours == report.accept_len.value > found.accept_len
        assert found.beaten and found.difference.value == pytest.approx(found.ours - found.accept_len)
    itself = [(p.verifications, sum(p.accepted)) for p in report.prompts]
    assert not compare("itself", report.prompts, itself, resamples=500, seed=0).beaten


def test_paired_interval_is_narrower_than_the_spread_of_prompts():
    """Prompts differ a lot, the drafters by little on each: paired, the difference is certain."""
    base = torch.tensor([[100, 10 * i] for i in range(20)])
    better = base + torch.tensor([0, 5])
    found = paired_difference(better, base, 2000, 0)
    assert found.value == pytest.approx(0.05) and found.low == pytest.approx(0.05) == pytest.approx(found.high)
    assert found.excludes_zero and not replace(found, low=-0.01).excludes_zero
    with pytest.raises(ValueError, match="no draft was verified"):
        paired_difference(base * 0, base, 10, 0)


def test_the_permuted_drafter_is_trained_by_the_users_own_command(tmp_path, monkeypatch):
    from types import SimpleNamespace

    from benchmarks import demo_check

    overrides = ["optimizer.lr=3e-4", "store=data/mine", "tracking=offline", "drafter_dir=outputs/x"]
    task = SimpleNamespace(get=lambda: SimpleNamespace(overrides=SimpleNamespace(task=overrides)))
    monkeypatch.setattr(demo_check, "HydraConfig", task)
    monkeypatch.setattr(demo_check, "permuted_store", lambda source, target, seed: target)
    commands = []

    def run(command, **_):
        commands.append(command)
        (tmp_path / "train").mkdir()
        (tmp_path / "train" / "summary.json").write_text('{"drafter_dir": "there/drafter", "accept_len": 1.1}')

    monkeypatch.setattr(demo_check.subprocess, "run", run)
    found = demo_check.train_permuted(SimpleNamespace(store="data/mine", seed=0), tmp_path)
    assert str(found) == "there/drafter"
    [[_, script, *told]] = commands
    assert script.endswith("train.py")
    own = [f"store={tmp_path / 'store'}", f"hydra.run.dir={tmp_path / 'train'}", "tracking=local"]
    assert told == ["optimizer.lr=3e-4", *own]
