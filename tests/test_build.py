"""What a training is built from: sizes from the verifier, RoPE, warm starts, and states that are too large."""

import logging
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from composed import config
from packed import all_rows, make_store, sample
from tiny import edit_json, tiny_verifier
from tiny_drafter import ORIGIN

from eagle3.build import build_drafter, prepare_data, shape_of, state_rms, warm_start_vocab, warn_of_large_states
from eagle3.config import Drafter as Settings
from eagle3.drafter import DrafterShape, Eagle3Drafter
from eagle3.export.directory import read_shape, save_drafter
from eagle3.plan import fingerprints
from eagle3.ttt import unroll
from extract.verifier import VerifierSpec, load_embedding, load_head, resolve_verifier

LAYERS = (1, 3, 5)


def spec_of(directory: Path) -> VerifierSpec:
    cache = directory / "cache"
    return resolve_verifier(str(directory), name="tiny", cache_dir=cache, chat_template=None, trust_remote_code=False)


def settings(**changes: object) -> Settings:
    return replace(config().drafter, **{"draft_vocab_size": 40, **changes})


def fresh(spec: VerifierSpec, shape: DrafterShape, seed: int = 0) -> Eagle3Drafter:
    from eagle3.vocab import build_vocab

    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 9, (spec.vocab_size,), generator=generator)
    vocab = build_vocab(counts, shape.draft_vocab_size, spec.end_of_turn_ids)
    return build_drafter(shape, vocab, load_embedding(spec), load_head(spec), init_from=None, seed=seed)


def test_sizes_are_the_verifiers_unless_said(tmp_path: Path):
    spec = spec_of(tiny_verifier(tmp_path, hidden=48, heads=4, kv_heads=2, head_dim=16))
    shape = shape_of(settings(), spec, LAYERS)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.hidden_size) == (4, 2, 16, 48)
    drafter = fresh(spec, shape)
    tokens, rows = torch.arange(12), torch.arange(2, 9)
    document = torch.zeros(1, 12, dtype=torch.int32)
    index = torch.stack([rows + 1, rows + 2])
    states = torch.stack(unroll(drafter, torch.randn(12, 3 * 48), tokens, tokens, document, rows, index))
    states.square().sum().backward()
    assert states.shape == (2, 7, 48)
    save_drafter(drafter, tmp_path / "drafter", origin=ORIGIN)
    assert read_shape(tmp_path / "drafter") == shape

    other = shape_of(settings(num_heads=6, num_kv_heads=3, head_dim=8, intermediate_size=20), spec, LAYERS)
    assert (other.num_heads, other.num_kv_heads, other.head_dim, other.intermediate_size) == (6, 3, 8, 20)
    with pytest.raises(ValueError, match=r"drafter.num_heads=6 is no multiple of drafter.num_kv_heads=4"):
        shape_of(settings(num_heads=6, num_kv_heads=4), spec, LAYERS)
    with pytest.raises(ValueError, match=r"drafter.draft_vocab_size=9999 exceeds"):
        shape_of(settings(draft_vocab_size=9999), spec, LAYERS)


@pytest.mark.parametrize(
    "said",
    [
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_parameters": None, "rope_theta": 1e6},
        {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4.0}},
    ],
)
def test_rope_of_the_verifier_reaches_drafter_and_export(tmp_path: Path, said: dict):
    directory = tiny_verifier(tmp_path / "v")
    edit_json(directory / "config.json", **said)
    spec = spec_of(directory)
    shape = shape_of(settings(), spec, LAYERS)
    assert shape.rope_parameters["rope_theta"] == 1e6
    assert shape.rope_parameters.get("factor") == said.get("rope_scaling", {}).get("factor")
    drafter = fresh(spec, shape)
    save_drafter(drafter, tmp_path / "drafter", origin=ORIGIN)
    assert read_shape(tmp_path / "drafter").rope_parameters == shape.rope_parameters
    slow = drafter.rotary.inv_freq[1] * shape.rope_parameters.get("factor", 1.0)
    torch.testing.assert_close(slow, torch.tensor(1e6 ** (-2 / shape.head_dim)))


def test_a_warm_start_keeps_weights_and_vocabulary(tmp_path: Path):
    spec = spec_of(tiny_verifier(tmp_path / "v"))
    shape = shape_of(settings(), spec, LAYERS)
    first = fresh(spec, shape)
    save_drafter(first, tmp_path / "drafter", origin=ORIGIN, dtype=torch.float32)
    store = make_store(tmp_path / "store", [sample(n, 12) for n in range(6)])  # other texts: other frequent tokens
    asked = dict(draft_vocab_size=40, always=[0], vocab_size=spec.vocab_size, row_tokens=32, overlong="split",
                 val_fraction=0.3, seed=0, ttt_steps=2)  # fmt: skip
    vocab = warm_start_vocab(tmp_path / "drafter", shape)
    data = prepare_data(store, vocab, **asked)
    again = build_drafter(
        shape, data.vocab, load_embedding(spec), load_head(spec), init_from=tmp_path / "drafter", seed=9
    )
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), again.state_dict().values(), strict=True))
    assert torch.equal(data.vocab.t2d, first.t2d) and data.vocab.coverage is not None
    assert not torch.equal(prepare_data(store, None, **asked).vocab.t2d, first.t2d)  # what a new map would have been


def test_other_weights_to_start_from_are_another_run(tmp_path: Path):
    for name in ("index.jsonl", "teacher.jsonl"):
        (tmp_path / name).write_text("")
    spec = spec_of(tiny_verifier(tmp_path / "v"))
    found = [fingerprints(tmp_path, None)]
    for seed in (0, 0, 1):
        save_drafter(fresh(spec, shape_of(settings(), spec, LAYERS), seed), tmp_path / "drafter", origin=ORIGIN)
        found.append(fingerprints(tmp_path, tmp_path / "drafter"))
    assert found[0].keys() == {"store"} and found[1] == found[2] != found[3]


def test_a_warm_start_of_another_network_is_refused(tmp_path: Path):
    spec = spec_of(tiny_verifier(tmp_path / "v"))
    shape = shape_of(settings(), spec, LAYERS)
    save_drafter(fresh(spec, shape), tmp_path / "drafter", origin=ORIGIN)
    with pytest.raises(ValueError, match=r"drafts 40 of .* set it to 40"):
        warm_start_vocab(tmp_path / "drafter", shape_of(settings(draft_vocab_size=41), spec, LAYERS))
    vocab = warm_start_vocab(tmp_path / "drafter", shape)
    wider = shape_of(settings(intermediate_size=99), spec, LAYERS)
    with pytest.raises(ValueError, match=r"intermediate_size: \d+ there, 99 here"):
        build_drafter(wider, vocab, load_embedding(spec), load_head(spec), init_from=tmp_path / "drafter", seed=0)


def test_a_verifier_of_another_width_is_refused(tmp_path: Path):
    spec = spec_of(tiny_verifier(tmp_path / "v", hidden=48))
    shape = shape_of(settings(), spec, LAYERS)
    with pytest.raises(ValueError, match=r"the verifier's embedding is \(.*, 32\), the drafter expects"):
        vocab = fresh(spec, shape)
        Eagle3Drafter(shape, warm_vocab(vocab), torch.zeros(spec.vocab_size, 32))


def warm_vocab(drafter: Eagle3Drafter):
    from eagle3.vocab import DraftVocab

    return DraftVocab.from_tensors(drafter.d2t, drafter.t2d)


def test_large_states_are_told_and_fc_norm_bounds_them(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    store = make_store(tmp_path / "store", [sample(n, 12) for n in range(4)])
    rows = all_rows(store)
    layers = len(store.manifest["capture_layers"])
    rms = state_rms(rows, layers)
    batch = rows.read([0], ("aux",))
    aux = batch["aux"][batch["document"] >= 0].float()
    assert rms[0] == pytest.approx(aux[:, : aux.shape[1] // layers].square().mean().sqrt().item(), rel=1e-5)

    spec = spec_of(tiny_verifier(tmp_path / "v"))
    for fc_norm in (False, True):
        shape = shape_of(settings(fc_norm=fc_norm), spec, LAYERS)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            warn_of_large_states([1.0, 2.0, 1e6], shape)
        assert ("layer 5: 1,000,000" in caplog.text) != fc_norm
        fused = fresh(spec, shape).fuse(1e6 * torch.randn(4, 3 * spec.hidden_size))
        assert (fused.abs().max() < 100) == fc_norm
    assert set(asdict(shape)) >= {"fc_norm"}
