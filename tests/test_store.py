"""The store as its users see it: what goes in comes out, the unfit is refused, and reading is cheap."""

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tiny_store import HIDDEN, LAYERS, assert_holds, in_child, manifest, sample, samples, write_store

from extract.store import (
    StoredSample,
    StoreFull,
    bytes_per_token,
    create_or_resume,
    open_store,
    require_space,
    verify,
)

ROOT = Path(__file__).parent.parent


def run_module(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "extract.store", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=15),
    shard_bytes=st.integers(1, 6000),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    first_run=st.integers(0, 15),
)
def test_round_trip(tmp_path_factory, lengths, shard_bytes, dtype, first_run):
    path = tmp_path_factory.mktemp("store") / "made" / "here"
    what = samples(lengths, dtype=dtype)
    with create_or_resume(path, manifest(dtype=dtype), shard_bytes=shard_bytes) as writer:
        for one in what[:first_run]:
            writer.add(one)
    write_store(path, what, shard_bytes=shard_bytes, dtype=dtype)
    assert_holds(open_store(path, need_complete=True), what)
    assert verify(path).faults == []


def test_samples_keep_their_states_past_shard_ten(tmp_path):
    what = samples(range(1, 26))
    write_store(tmp_path, what, shard_bytes=1)
    store = open_store(tmp_path)
    assert [ref.shard for ref in store.samples] == list(range(25))
    assert [ref.id for ref in store.samples] == [one.id for one in what]
    assert_holds(store, what)


def test_a_shard_is_plain_safetensors_of_five_tensors(tmp_path):
    what = samples([3, 5, 4])
    write_store(tmp_path, what, shard_bytes=1 << 20)
    with safe_open(tmp_path / "shards" / "00000.safetensors", "pt") as shard:
        assert sorted(shard.keys()) == ["aux", "input_ids", "last", "loss_mask", "offsets"]
        assert shard.get_tensor("offsets").tolist() == [0, 3, 8, 12]
        assert torch.equal(shard.get_tensor("aux"), torch.cat([one.aux for one in what]))
        assert torch.equal(shard.get_tensor("last"), torch.cat([one.last for one in what]))


def test_number_of_tensors_does_not_grow_with_samples(tmp_path):
    write_store(tmp_path, samples([1] * 300), shard_bytes=1 << 20)
    raw = (tmp_path / "shards" / "00000.safetensors").read_bytes()
    assert int.from_bytes(raw[:8], "little") < 1000


def test_views_of_one_padded_batch_are_stored_at_their_true_length(tmp_path):
    lengths = [3, 17, 9]
    batch = torch.randn(3, 17, len(LAYERS) * HIDDEN + HIDDEN).bfloat16()
    what = [
        StoredSample(f"s{i}", "c", 0.0, [1] * n, [1] * n, batch[i, :n, : len(LAYERS) * HIDDEN], batch[i, :n, -HIDDEN:])
        for i, n in enumerate(lengths)
    ]
    write_store(tmp_path, what, shard_bytes=1 << 20)
    assert_holds(open_store(tmp_path), what)
    raw = (tmp_path / "shards" / "00000.safetensors").read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    states_ids_masks = sum(lengths) * (2 * 4 * HIDDEN + 4 + 1)
    assert len(raw) == header + states_ids_masks + 8 * (len(lengths) + 1)


def test_shards_stay_below_their_limit(tmp_path):
    write_store(tmp_path, samples([10] * 20), shard_bytes=3000)
    sizes = [file.stat().st_size for file in (tmp_path / "shards").iterdir()]
    assert len(sizes) > 3 and max(sizes) < 3000 + 1000  # the header comes on top
    with pytest.raises(ValueError, match="shard_bytes"):
        create_or_resume(tmp_path / "other", manifest(), shard_bytes=(1 << 30) + 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", ["aux", "last"])
def test_states_that_are_not_finite_are_quarantined_by_name(tmp_path, which, value):
    bad = sample(7, 1500)
    getattr(bad, which)[1203, 3] = value
    with create_or_resume(tmp_path, manifest(), shard_bytes=1 << 20) as writer:
        assert writer.add(sample(1, 5)) and not writer.add(bad)
        writer.finish(["s1", "s7"])
    assert [ref.id for ref in open_store(tmp_path).samples] == ["s1"]
    record = json.loads((tmp_path / "quarantine.jsonl").read_text())
    assert record == {"id": "s7", "reason": f"{which} is not finite at token 1203"}
    with create_or_resume(tmp_path, manifest(), shard_bytes=1 << 20) as writer:
        assert writer.done == {"s1"} and set(writer.quarantined) == {"s7"}


def test_fewer_rows_than_tokens_never_reach_a_shard(tmp_path):
    whole = sample(3, 10)
    with create_or_resume(tmp_path, manifest(), shard_bytes=1 << 20) as writer:
        assert not writer.add(replace(whole, aux=whole.aux[:9]))
        assert not writer.add(replace(whole, id="short", last=whole.last[:4]))
        assert not writer.add(replace(whole, id="mask", loss_mask=[1] * 9))
        assert not writer.add(replace(whole, id="none", input_ids=[], loss_mask=[]))
        assert "10 tokens" in writer.quarantined["s3"] and "9 aux rows" in writer.quarantined["s3"]
        assert writer.add(whole)
        writer.finish(["s3", "short", "mask", "none"])
    with create_or_resume(tmp_path, manifest(), shard_bytes=1 << 20) as writer:
        assert set(writer.quarantined) == {"short", "mask", "none"}  # s3 came good


def test_what_no_sample_may_have_is_an_error(tmp_path):
    one = sample(1, 5)
    with create_or_resume(tmp_path, manifest(), shard_bytes=1 << 20) as writer:
        writer.add(one)
        with pytest.raises(ValueError, match="s1 is stored already"):
            writer.add(one)
        writer.flush()
        with pytest.raises(ValueError, match="s1 is stored already"):
            writer.add(one)
        with pytest.raises(ValueError, match=r"s2: aux is torch.float16"):
            writer.add(replace(one, id="s2", aux=one.aux.half()))
        with pytest.raises(ValueError, match=r"last is .* \[5, 7\].*\[tokens, 8\]"):
            writer.add(replace(one, id="s2", last=one.last[:, :7]))


def test_float16_is_refused_and_large_values_survive(tmp_path):
    with pytest.raises(ValueError, match="float16"):
        create_or_resume(tmp_path / "half", {**manifest(), "dtype": "float16"}, shard_bytes=1000)
    one = sample(1, 4)
    one.aux[2, 2] = 1e5
    write_store(tmp_path / "bf16", [one])
    store = open_store(tmp_path / "bf16")
    assert store.read(store.samples[0], ("aux",))["aux"][2, 2].item() == torch.tensor(1e5).bfloat16().item()


def test_finish_names_the_samples_that_are_missing(tmp_path):
    with create_or_resume(tmp_path, manifest(), shard_bytes=1000) as writer:
        writer.add(sample(0, 5))
        with pytest.raises(ValueError, match=r"2 of 3 samples .* first s1"):
            writer.finish(["s0", "s1", "s2"])
    with pytest.raises(ValueError, match="interrupted"):
        open_store(tmp_path, need_complete=True)
    assert len(open_store(tmp_path).samples) == 1


def test_resume_lists_every_setting_that_differs(tmp_path):
    write_store(tmp_path, samples([5]))
    changed = {**manifest(max_len=32, template="new", verifier={"sha256": "v2"}), "capture_layers": [1, 2, 3]}
    with pytest.raises(ValueError) as caught:
        create_or_resume(tmp_path, changed, shard_bytes=1000)
    text = str(caught.value)
    for line in ("max_len: 64 -> 32", "verifier.sha256: 'v1' -> 'v2'", "template: '<absent>' -> 'new'"):
        assert line in text
    assert "capture_layers: [1, 2, 4] -> [1, 2, 3]" in text
    write_store(tmp_path, samples([5, 6]))  # and the lock was let go


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("last", "pre_norm", "post_norm"), ("schema", 3, "schema"), ("dtype", "fp8", "fp8"), ("codec", "fp4", "fp4")],
)
def test_a_store_that_would_be_misread_is_refused(tmp_path, key, value, said):
    write_store(tmp_path, samples([5]))
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(ValueError, match=said):
        open_store(tmp_path)
    with pytest.raises(ValueError, match=said):
        verify(tmp_path)


def test_opening_what_is_no_store_tells_the_absolute_path(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path}/nowhere is no store"):
        open_store(tmp_path / "nowhere")


def test_slices_and_workers(tmp_path):
    what = samples([10, 20, 30])
    write_store(tmp_path, what, shard_bytes=1 << 20)
    store = open_store(tmp_path)
    ref = store.samples[1]
    part = store.read((ref.shard, ref.start + 3, ref.start + 8), ("aux", "input_ids"))
    assert torch.equal(part["aux"], what[1].aux[3:8]) and part["input_ids"].tolist() == what[1].input_ids[3:8]
    sent = pickle.dumps(store)
    assert len(sent) < 5000
    assert_holds(pickle.loads(sent), what)
    part["aux"].zero_()
    assert_holds(open_store(tmp_path), what)
    for where in ((0, 5, 61), (0, -1, 4), (0, 4, 4)):
        with pytest.raises(ValueError, match="shard 0"):
            store.read(where, ("last",))
    with pytest.raises(ValueError, match="no tensor 'logits'"):
        store.read(ref, ("logits",))
    with pytest.raises(ValueError, match="teacher pass"):
        store.read(ref, ("top1",))


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def test_reading_a_slice_touches_and_sends_no_more_than_the_slice(tmp_path):
    what = [replace(sample(i, 20_000, hidden=256), id=f"s{i}") for i in range(2)]
    with create_or_resume(tmp_path, {**manifest(), "hidden_size": 256}, shard_bytes=1 << 30) as writer:
        for one in what:
            writer.add(one)
    store = open_store(tmp_path)
    assert (tmp_path / "shards" / "00000.safetensors").stat().st_size > 80_000_000

    def work() -> None:
        before = resident_bytes("VmRSS")
        states = store.read((0, 20_100, 20_140), ("aux", "last"))
        assert torch.equal(states["aux"], what[1].aux[100:140])
        assert states["aux"].untyped_storage().nbytes() == 40 * 3 * 256 * 2
        assert resident_bytes("VmRSS") - before < 20_000_000  # the system maps some pages around

    assert in_child(work) == 0


def test_memory_of_the_writer_is_three_shards(tmp_path):
    shard_bytes, tokens, num_samples = 16 << 20, 4096, 60  # 2 MiB a sample, 120 MiB in all

    def work() -> None:
        with create_or_resume(tmp_path, {**manifest(), "hidden_size": 64}, shard_bytes=shard_bytes) as writer:
            writer.add(replace(sample(0, 5, hidden=64), id="first"))
            writer.flush()
            before = resident_bytes("VmHWM")
            for number in range(num_samples):
                aux = torch.full((tokens, 3 * 64), float(number), dtype=torch.bfloat16)
                last = torch.zeros(tokens, 64, dtype=torch.bfloat16)
                writer.add(StoredSample(f"s{number}", "c", 0.0, [1] * tokens, [1] * tokens, aux, last))
        assert resident_bytes("VmHWM") - before < 3.5 * shard_bytes

    assert in_child(work) == 0
    assert len(open_store(tmp_path).samples) == num_samples + 1


def test_space_is_told_before_the_work(tmp_path):
    per_token = bytes_per_token(hidden_size=7168, num_capture_layers=3, dtype="bfloat16", codec="none")
    assert per_token == 8 * 7168 + 13
    require_space(tmp_path / "not" / "yet", 1000)
    with pytest.raises(StoreFull, match=f"{tmp_path}: .* needed, .* free"):
        require_space(tmp_path, 10**15 * per_token)


def test_verify_and_show_on_the_command_line(tmp_path):
    write_store(tmp_path / "store", samples([5, 9, 12]), shard_bytes=600)
    shown = run_module("show", str(tmp_path / "store"))
    assert shown.returncode == 0 and "26, supervised" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert run_module("verify", str(tmp_path / "store")).returncode == 0
    shard = tmp_path / "store" / "shards" / "00001.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-30] ^= 1
    shard.write_bytes(raw)
    found = run_module("verify", str(tmp_path / "store"))
    assert found.returncode == 1 and "was altered" in "".join(found.stdout.split("\n")).replace("│", "")
    missing = run_module("verify", str(tmp_path / "nothing"))
    assert missing.returncode == 1 and "is no store" in missing.stderr and "Traceback" not in missing.stderr
