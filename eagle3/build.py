"""What a training needs before its first step: data, vocabulary, network. Everything that can be checked is, here."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from eagle3.config import Drafter as DrafterSettings
from eagle3.data import PackedStore, RowCounts, count_rows
from eagle3.drafter import DrafterShape, Eagle3Drafter, initialise
from eagle3.export.config import serving_of
from eagle3.export.directory import load_drafter, read_vocab
from eagle3.rows import count_tokens, plan_rows, require_greedy, split_conversations
from eagle3.supervision import row_counts
from eagle3.vocab import DraftVocab, build_vocab
from extract.numbering import DEFAULT_SGLANG
from extract.store import Store, open_store
from extract.verifier import VerifierSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingData:
    train: PackedStore
    val: PackedStore
    train_counts: RowCounts
    val_counts: RowCounts
    vocab: DraftVocab


def open_checked(path: Path, spec: VerifierSpec, capture_layers: Sequence[int] | None = None) -> Store:
    """A finished store that was made with this very verifier and chat template, and with these layers, if any are told.

    Raises:
        ValueError: naming what differs, or the stage that is not finished.
    """
    store = open_store(path, need_teacher=True, need_complete=True)
    made_with = store.manifest["verifier"]
    if made_with["sha256"] != spec.sha256:
        raise ValueError(
            f"{path} was made with verifier {made_with['name']} ({made_with['sha256'][:12]}), not with "
            f"{spec.name} at {spec.path} ({spec.sha256[:12]}); give the store's verifier, or another store"
        )
    if made_with["chat_template_sha256"] != spec.chat_template_sha256:
        raise ValueError(f"{path} was made with another chat template; give the same verifier.chat_template as then")
    if capture_layers is not None and sorted(capture_layers) != store.manifest["capture_layers"]:
        raise ValueError(
            f"{path} holds layers {store.manifest['capture_layers']}, the config says verifier.capture_layers="
            f"{list(capture_layers)}; leave that key out, or extract into another store"
        )
    return store


def prepare_data(
    store: Store,
    vocab: DraftVocab | None,
    *,
    draft_vocab_size: int,
    always: Collection[int],
    vocab_size: int,
    row_tokens: int,
    overlong: Any,
    val_fraction: float,
    seed: int,
    ttt_steps: int,
) -> TrainingData:
    """Split, draft vocabulary (unless a warm start brings its own), packs, and the row counts of every pack."""
    train_refs, val_refs = split_conversations(store.samples, val_fraction, seed)
    counts = count_tokens(store, train_refs, vocab_size)
    if vocab is None:
        vocab = build_vocab(counts, draft_vocab_size, always)
    else:
        vocab = replace(vocab, coverage=vocab.covered(counts))
    train, val = (
        PackedStore(store, plan_rows(store, refs, row_tokens, overlong=overlong)) for refs in (train_refs, val_refs)
    )
    require_greedy(val.plan)
    of_train, of_val = (count_rows(split, row_counts, vocab.t2d, ttt_steps) for split in (train, val))
    return TrainingData(train, val, of_train, of_val, vocab)


LARGE_STATES = 500.0
"""Root mean square of a captured layer above which its fusion without a norm tends to diverge (fc_norm bounds it)."""


def state_rms(data: PackedStore, layers: int) -> list[float]:
    """Root mean square of each captured layer over the tokens of one packed row."""
    batch = data.read([0], ("aux",))
    aux = batch["aux"][batch["document"] >= 0].float().unflatten(-1, (layers, -1))
    return aux.square().mean((0, 2)).sqrt().tolist()


def warn_of_large_states(rms: Sequence[float], shape: DrafterShape) -> None:
    """Some verifiers' residual streams grow so large that the fused state explodes: say so before it trains."""
    if max(rms) > LARGE_STATES and not shape.fc_norm:
        told = ", ".join(f"layer {layer}: {value:,.0f}" for layer, value in zip(shape.capture_layers, rms, strict=True))
        log.warning("captured states are large (root mean square %s); drafter=eagle31 norms them before fusion", told)


def warn_of_serving(shape: DrafterShape, family: str) -> None:
    """Says before it trains that the drafter will not be servable by SGLang, if so."""
    try:
        serving_of(shape, family, DEFAULT_SGLANG)
    except ValueError as error:
        log.warning("the drafter will be written for vLLM alone: %s", error)


def shape_of(settings: DrafterSettings, spec: VerifierSpec, capture_layers: tuple[int, ...]) -> DrafterShape:
    """The drafter's sizes: the verifier's wherever `settings` says null."""
    shape = DrafterShape(
        hidden_size=spec.hidden_size,
        intermediate_size=settings.intermediate_size or spec.intermediate_size,
        num_heads=settings.num_heads or spec.num_heads,
        num_kv_heads=settings.num_kv_heads or spec.num_kv_heads,
        head_dim=settings.head_dim or spec.head_dim,
        vocab_size=spec.vocab_size,
        draft_vocab_size=settings.draft_vocab_size,
        capture_layers=capture_layers,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters=settings.rope_parameters or spec.rope_parameters,
        max_position_embeddings=spec.max_position_embeddings,
        fc_norm=settings.fc_norm,
        norm_output=settings.norm_output,
    )
    if shape.num_heads % shape.num_kv_heads:
        raise ValueError(
            f"drafter.num_heads={shape.num_heads} is no multiple of drafter.num_kv_heads={shape.num_kv_heads}"
        )
    if shape.draft_vocab_size > spec.vocab_size:
        raise ValueError(
            f"drafter.draft_vocab_size={shape.draft_vocab_size} exceeds the vocabulary of {spec.name}, "
            f"{spec.vocab_size}; lower it"
        )
    return shape


def warm_start_vocab(directory: Path, shape: DrafterShape) -> DraftVocab:
    """The draft vocabulary of the drafter to start from: it stays, or every head row would change its meaning."""
    vocab = read_vocab(directory)
    if vocab.size != shape.draft_vocab_size or vocab.vocab_size != shape.vocab_size:
        raise ValueError(
            f"drafter.init_from={directory} drafts {vocab.size} of {vocab.vocab_size} tokens, the config asks for "
            f"drafter.draft_vocab_size={shape.draft_vocab_size} of {shape.vocab_size}; set it to {vocab.size}"
        )
    return vocab


def build_drafter(
    shape: DrafterShape,
    vocab: DraftVocab,
    embedding: Float[Tensor, "V H"],
    head: Float[Tensor, "V H"],
    *,
    init_from: Path | None,
    seed: int,
) -> Eagle3Drafter:
    """A fresh drafter, or the one in `init_from`; float32 either way."""
    if init_from is None:
        drafter = Eagle3Drafter(shape, vocab, embedding)
        initialise(drafter, head, seed)
        return drafter
    drafter = load_drafter(init_from, embedding)
    if drafter.shape != shape:
        ours, theirs = vars(shape), vars(drafter.shape)
        differing = ", ".join(f"{k}: {theirs[k]} there, {ours[k]} here" for k in ours if ours[k] != theirs[k])
        raise ValueError(f"drafter.init_from={init_from} is another network than the config asks for: {differing}")
    return drafter.to(torch.float32)


def always_drafted(special_ids: Collection[int], end_of_turn_ids: Collection[int], vocab_size: int) -> set[int]:
    """Special and end-of-turn ids, as far as the verifier's weights have a row for them."""
    return {token for token in (*special_ids, *end_of_turn_ids) if token < vocab_size}
