"""Captured states in eight bits: how far they may be off, and that no store is read as what it is not."""

import json
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tiny_store import HIDDEN, LAYERS, manifest, sample, samples, write_store

from extract import store_codec
from extract.engines.base import Captured, EngineError
from extract.probe import Told, probe
from extract.store import bytes_per_token, create_or_resume, open_store, verify
from extract.store_codec import FP8, FP8_MAX, SMALLEST_SCALE, decode, encode
from extract.teacher import teacher_pass

WHAT = samples([5, 9, 4, 12])
FLOATS = {torch.bfloat16: torch.finfo(torch.bfloat16).max, torch.float32: torch.finfo(torch.float32).max}


@st.composite
def states(draw):
    """[T, A * H] of any magnitudes, row by row: zeros, the tiniest and the largest numbers there are."""
    dtype = draw(st.sampled_from(sorted(FLOATS, key=str)))
    tokens, layers, hidden = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    rows = []
    for _ in range(tokens * layers):
        power = draw(st.integers(-149, 127))
        small = st.floats(-1, 1, width=32) | st.sampled_from([0.0, -0.0, 1.0])
        row = torch.tensor(draw(st.lists(small, min_size=hidden, max_size=hidden)), dtype=torch.float64)
        rows.append((row * 2.0**power * draw(st.sampled_from([1.0, 1.9999]))).clamp(-FLOATS[dtype], FLOATS[dtype]))
    return torch.stack(rows).to(dtype).view(tokens, layers * hidden), layers


@settings(max_examples=100, deadline=None)
@given(states(), st.integers(1, 40))
def test_every_number_is_off_by_a_sixteenth_of_itself_or_by_next_to_nothing_of_its_row(given_states, chunk):
    aux, layers = given_states
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_codec, "_ITEMS_A_CHUNK", chunk)
        codes, scales = encode(aux, layers)
        found = decode(codes, scales, aux.dtype)
    assert codes.dtype == FP8 and codes.shape == aux.shape and scales.shape == (len(aux), layers)
    assert found.dtype == aux.dtype and found.isfinite().all()
    rows, back = (tensor.double().view(len(aux) * layers, -1) for tensor in (aux, found))
    scale = scales.double().view(-1, 1)
    rounding = torch.finfo(aux.dtype).eps
    allowed = torch.maximum(rows.abs() / 16, scale * 2**-10) * (1 + 2 * rounding) + rows.abs() * rounding
    assert ((rows - back).abs() <= allowed + torch.finfo(aux.dtype).smallest_normal * rounding).all()
    normal = scales.view(-1) > SMALLEST_SCALE
    largest, place = rows.abs().max(dim=1)
    kept = back.abs().gather(1, place[:, None])[:, 0]
    torch.testing.assert_close(kept[normal], largest[normal], rtol=rounding, atol=0)
    assert torch.equal(back[rows == 0], torch.zeros_like(back[rows == 0]))


@settings(max_examples=100, deadline=None)
@given(states())
def test_encoding_what_was_decoded_changes_nothing(given_states):
    aux, layers = given_states
    once = decode(*encode(aux, layers), aux.dtype)
    twice = decode(*encode(once, layers), aux.dtype)
    if aux.dtype == torch.bfloat16:
        assert torch.equal(once, twice)
    else:  # a scale is amax / 448, rounded: an ulp of float32 may go
        torch.testing.assert_close(once, twice, rtol=2**-22, atol=2.0**-140)


def test_all_codes_are_read_as_torch_reads_them():
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    finite = codes.float().isfinite()
    assert finite.sum() == 254
    found = decode(codes[None], torch.ones(1, 1), torch.float32)[0]
    assert torch.equal(found[finite], codes.float()[finite])


def test_each_layer_of_a_token_has_its_own_scale():
    aux = torch.tensor([[1.0, 0.5, 1000.0, 1.0], [0.0, 0.0, 1e-30, 3e-30]])
    codes, scales = encode(aux, 2)
    torch.testing.assert_close(scales, torch.tensor([[1.0, 1000.0], [0.0, 3e-30]]) / FP8_MAX)
    assert scales[1, 0] == SMALLEST_SCALE
    found = decode(codes, scales, torch.float32)
    torch.testing.assert_close(found, aux, rtol=1 / 16, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_comes_back_without_a_finite_number_and_never_gets_into_a_store(tmp_path, value):
    aux = torch.tensor([[value, 1.0, 0.0], [2.0, 1.0, 0.0]])
    found = decode(*encode(aux, 1), torch.bfloat16)
    assert not found[0].isfinite().any() and found[1].isfinite().all()
    bad = sample(7, 6)
    bad.aux[4, 3] = value
    with create_or_resume(tmp_path, manifest(codec="fp8"), shard_bytes=1 << 20) as writer:
        assert not writer.add(bad) and writer.quarantined["s7"] == "aux is not finite at token 4"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    shard_bytes=st.integers(1, 6000),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)
def test_a_store_gives_back_what_the_codec_keeps_and_last_to_the_bit(tmp_path_factory, lengths, shard_bytes, dtype):
    path, what = tmp_path_factory.mktemp("store"), samples(lengths, dtype=dtype)
    write_store(path, what, shard_bytes=shard_bytes, dtype=dtype, codec="fp8")
    store = open_store(path, need_complete=True)
    assert verify(path).faults == [] and len(store.samples) == len(what)
    for ref, one in zip(store.samples, what, strict=True):
        found = store.read(ref, ("aux", "last", "input_ids", "loss_mask"))
        assert torch.equal(found["aux"], decode(*encode(one.aux, len(LAYERS)), one.aux.dtype))
        assert torch.equal(found["last"], one.last)
        part = store.read((ref.shard, ref.start + ref.tokens - 1, ref.start + ref.tokens), ("aux",))["aux"]
        assert torch.equal(part, found["aux"][-1:])


def test_the_plan_knows_its_bytes_and_a_shard_takes_them(tmp_path):
    sizes = {"num_capture_layers": 3, "dtype": "bfloat16"}
    assert bytes_per_token(hidden_size=7168, codec="fp8", **sizes) == 3 * (7168 + 4) + 2 * 7168 + 13
    write_store(tmp_path, WHAT, shard_bytes=1 << 20, codec="fp8")
    tokens, file = sum(len(one.input_ids) for one in WHAT), tmp_path / "shards" / "00000.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    a_token = bytes_per_token(hidden_size=HIDDEN, codec="fp8", **sizes) - 8  # the teacher's two numbers lie elsewhere
    assert file.stat().st_size == header + tokens * a_token + 8 * (len(WHAT) + 1)
    with safe_open(file, "pt") as shard:  # other programs read it too, and every tensor is aligned
        assert shard.get_tensor("aux").dtype == FP8 and shard.get_tensor("aux_scale").shape == (tokens, 3)


def test_the_teacher_says_the_same_of_both_stores(tmp_path):
    head, said = torch.randn(50, HIDDEN), []
    for codec in store_codec.CODECS:
        write_store(tmp_path / codec, WHAT, shard_bytes=1 << 20, codec=codec)
        list(teacher_pass(tmp_path / codec, head, device="cpu", chunk_tokens=4))
        store = open_store(tmp_path / codec, need_teacher=True)
        said.append([store.read(ref, ("top1", "lse")) for ref in store.samples])
    for none, fp8 in zip(*said, strict=True):
        assert torch.equal(none["top1"], fp8["top1"]) and torch.equal(none["lse"], fp8["lse"])


@pytest.mark.parametrize("codecs", [("none", "fp8"), ("fp8", "none")])
def test_another_codec_is_refused_on_resume(tmp_path, codecs):
    write_store(tmp_path, WHAT, codec=codecs[0])
    with pytest.raises(ValueError, match=f"codec: '{codecs[0]}' -> '{codecs[1]}'"):
        write_store(tmp_path, WHAT, codec=codecs[1])


def test_a_manifest_that_names_another_codec_than_its_shards_have_is_refused(tmp_path):
    file = tmp_path / "manifest.json"
    for codec, other in (("none", "fp8"), ("fp8", "none")):
        write_store(tmp_path, WHAT, codec=codec)
        file.write_text(json.dumps({**json.loads(file.read_text()), "codec": other}))
        with pytest.raises(ValueError, match="does not hold the tensors"):
            open_store(tmp_path)
        for left in [file, tmp_path / "index.jsonl", *(tmp_path / "shards").iterdir()]:
            left.unlink()


def test_a_store_of_before_there_were_codecs_is_one_without_and_goes_on(tmp_path):
    write_store(tmp_path, WHAT[:3])
    file = tmp_path / "manifest.json"
    old = json.loads(file.read_text()) | {"schema": 1}
    with_codec = dict(old)
    del old["codec"]
    file.write_text(json.dumps(old))
    assert open_store(tmp_path).manifest["codec"] == "none"
    with pytest.raises(ValueError, match="codec: 'none' -> 'fp8'"):
        write_store(tmp_path, WHAT, codec="fp8")
    write_store(tmp_path, WHAT)
    assert json.loads(file.read_text())["schema"] == 2 and verify(tmp_path).faults == []
    file.write_text(json.dumps(with_codec))  # nobody has written such a thing
    with pytest.raises(ValueError, match="store schema 1, this version reads 2"):
        open_store(tmp_path)


def test_a_damaged_store_is_mended_in_its_codec(tmp_path):
    write_store(tmp_path, WHAT, shard_bytes=300, codec="fp8")
    before = [open_store(tmp_path).read(ref, ("aux",))["aux"] for ref in open_store(tmp_path).samples]
    (tmp_path / "shards" / "00001.safetensors").write_bytes(b"cut")
    write_store(tmp_path, WHAT, shard_bytes=300, codec="fp8")
    store = open_store(tmp_path, need_complete=True)
    place = {ref.id: ref for ref in store.samples}
    for one, aux in zip(WHAT, before, strict=True):
        assert torch.equal(store.read(place[one.id], ("aux",))["aux"], aux)


def test_a_proof_of_stored_states_allows_for_the_codec_and_for_no_more():
    truth = Captured(torch.randn(20, 3 * 64), torch.randn(20, 64))
    head = torch.zeros(5, 64)
    told = Told(torch.zeros(19, dtype=torch.int64), torch.full((19,), -math.log(5)))
    stored = Captured(decode(*encode(truth.aux, 3), torch.float32), truth.last)
    assert 0.01 < probe([(truth, stored)], [told], head, FP8).states_max_difference < 1 / 16
    with pytest.raises(EngineError, match=r"allowed in torch\.float32"):
        probe([(truth, stored)], [told], head, torch.float32)
    with pytest.raises(EngineError, match=r"allowed in torch\.float8_e4m3fn"):
        probe([(truth, Captured(1.2 * stored.aux, truth.last))], [told], head, FP8)
    assert max(FP8, torch.bfloat16, torch.float32, key=lambda dtype: torch.finfo(dtype).eps) == FP8
