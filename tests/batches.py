"""Random packed batches and drafters of a few hundred weights, for the tests of the maths."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from eagle3.drafter import DrafterShape, Eagle3Drafter
from eagle3.module import DrafterModule, Recipe
from eagle3.row_losses import LOSSES
from eagle3.supervision import row_counts
from eagle3.vocab import DraftVocab

SHAPE = DrafterShape(
    hidden_size=12,
    intermediate_size=20,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    vocab_size=9,
    draft_vocab_size=6,
    capture_layers=(1, 2, 3),
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    max_position_embeddings=64,
)

RECIPE = Recipe(
    ttt_steps=3,
    step_decay=0.8,
    noise_std=0.0,
    loss="soft_ce",
    lr=1e-3,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.0,
    warmup_ratio=0.0,
    floor_ratio=0.0,
    clip_norm=1e9,
    total_steps=10,
    micro_batches=1,
    seed=0,
)


@dataclass(frozen=True)
class Case:
    """A drafter, the verifier's head [V, H], and one packed batch."""

    drafter: Eagle3Drafter
    head: Tensor
    batch: dict[str, Any]
    recipe: Recipe

    @property
    def teacher_head(self) -> Tensor:
        return self.head[self.drafter.t2d]

    def module(self) -> DrafterModule:
        return DrafterModule(self.drafter, self.teacher_head, self.recipe)


def random_drafter(shape: DrafterShape, seed: int) -> Eagle3Drafter:
    """Weights large enough that attention and norms matter; norms are not all ones."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(shape.vocab_size, generator=generator)[: shape.draft_vocab_size].sort().values
    embedding = torch.randn(shape.vocab_size, shape.hidden_size, generator=generator)
    drafter = Eagle3Drafter(shape, DraftVocab(ids, shape.vocab_size, None), embedding)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(1.0)
    return drafter


def random_batch(
    lengths: list[list[int]],
    tokens: int,
    drafter: Eagle3Drafter,
    head: Tensor,
    seed: int,
    ttt_steps: int,
    written: float,
) -> dict[str, Any]:
    """Documents of `lengths` in packed rows of `tokens`; the share `written` of the tokens is by the assistant."""
    generator = torch.Generator().manual_seed(seed)
    shape, size = drafter.shape, (len(lengths), tokens)
    document = torch.full(size, -1, dtype=torch.int32)
    position = torch.zeros(size, dtype=torch.long)
    greedy = torch.zeros(size, dtype=torch.bool)
    for row, of_row in enumerate(lengths):
        end = 0
        for number, length in enumerate(of_row):
            here = slice(end, end + length)
            document[row, here], position[row, here] = number, torch.arange(length)
            greedy[row, here] = bool(torch.rand((), generator=generator) < 0.7)
            end += length
    batch = {
        "input_ids": torch.randint(shape.vocab_size, size, generator=generator),
        # Padding is marked as written, too: nothing may rest on its mask.
        "loss_mask": torch.rand(size, generator=generator) < written,
        "document": document,
        "position": position,
        "greedy": greedy,
        "aux": torch.randn(*size, 3 * shape.hidden_size, generator=generator),
        "last": torch.randn(*size, shape.hidden_size, generator=generator),
        "rows": torch.arange(len(lengths)),
        "step": 0,
    }
    return with_teacher(batch, drafter, head, ttt_steps)


def with_teacher(batch: dict[str, Any], drafter: Eagle3Drafter, head: Tensor, ttt_steps: int) -> dict[str, Any]:
    """The batch with what follows from `last`, ids and masks: top1, lse, and |M_k|, as if it were a whole step."""
    logits = batch["last"].float() @ head.T
    batch = batch | {"top1": logits.argmax(-1), "lse": logits.logsumexp(-1)}
    small = {name: batch[name] for name in ("input_ids", "loss_mask", "document", "top1")}
    _, supervised = row_counts(**small, in_draft_vocab=drafter.t2d, ttt_steps=ttt_steps)
    return batch | {"supervised_total": supervised.sum(0)}


def make_case(
    lengths: list[list[int]],
    *,
    padding: int = 0,
    seed: int = 0,
    ttt_steps: int = 3,
    loss: str = "soft_ce",
    written: float = 0.8,
    **changes: Any,
) -> Case:
    """`changes` are those of the drafter's shape."""
    shape = replace(SHAPE, **changes)
    drafter = random_drafter(shape, seed)
    head = torch.randn(shape.vocab_size, shape.hidden_size, generator=torch.Generator().manual_seed(seed + 1)) * 0.5
    tokens = max(1, max(map(sum, lengths)) + padding)
    batch = random_batch(lengths, tokens, drafter, head, seed + 2, ttt_steps, written)
    return Case(drafter, head, batch, replace(RECIPE, ttt_steps=ttt_steps, loss=loss))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any loss, K 1..7, grouped keys, a head_dim of its own, both EAGLE-3.1 options, D up to V, documents of any
    length, and batches of which everything, nothing or a part is supervised."""
    kv_heads, vocab_size = draw(st.integers(1, 2)), draw(st.integers(3, 9))
    return make_case(
        draw(st.lists(st.lists(st.integers(1, 10), max_size=4), min_size=1, max_size=3)),
        padding=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 10**6)),
        ttt_steps=draw(st.integers(1, 7)),
        loss=draw(st.sampled_from(sorted(LOSSES))),
        written=draw(st.sampled_from([0.8, 1.0, 0.5, 0.0])),
        num_kv_heads=kv_heads,
        num_heads=kv_heads * draw(st.integers(1, 5)),
        head_dim=draw(st.sampled_from([2, 4, 10])),
        vocab_size=vocab_size,
        draft_vocab_size=draw(st.integers(1, vocab_size)),
        fc_norm=draw(st.booleans()),
        norm_output=draw(st.booleans()),
    )
