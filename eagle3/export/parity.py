"""Does a written drafter compute what its source computes? Both are run on random states, and must agree bit by bit.

The source's network is filled by the source's own tensor names, so that no renaming is shared with what was written.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle3 import ttt
from eagle3.drafter import DrafterShape, Eagle3Drafter
from eagle3.export.convert import Source
from eagle3.export.directory import load_drafter
from eagle3.vocab import DraftVocab

TOKENS, STEPS = 8, 3
Loader = Callable[[Float[Tensor, "V H"]], Eagle3Drafter]


def refuse_other_outputs(source: Source, written: Path) -> None:
    """ValueError if the drafter in `written` gives other logits or other tokens than `source` at any step."""
    before = _outputs(source.shape, lambda embedding: drafter_of(source, embedding))
    after = _outputs(source.shape, lambda embedding: load_drafter(written, embedding))
    for what, ours, theirs in zip(("logits", "tokens"), after, before, strict=True):
        if not torch.equal(ours, theirs):
            raise ValueError(f"the written drafter gives other {what} than its source ({source.form}); nothing written")


def drafter_of(source: Source, embedding: Float[Tensor, "V H"]) -> Eagle3Drafter:
    """The network of a source in float32, filled by its own tensor names."""
    weights = {name.removeprefix("model."): tensor for name, tensor in source.tensors.items()}
    d2t = weights.pop("d2t", torch.zeros(source.shape.draft_vocab_size, dtype=torch.int64))
    weights.pop("t2d", None)
    drafter = Eagle3Drafter(source.shape, DraftVocab.from_offsets(d2t, source.shape.vocab_size), embedding)
    named = nn.Module()
    if any(name.startswith("layers.0.") for name in weights):
        named.layers = nn.ModuleList([drafter.midlayer])
    else:
        named.midlayer = drafter.midlayer
    for name in ("fc", "fc_norm", "norm", "lm_head"):
        if hasattr(drafter, name):
            setattr(named, name, getattr(drafter, name))
    named.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return drafter


@torch.inference_mode()
def _outputs(shape: DrafterShape, load: Loader) -> tuple[Float[Tensor, "K R D"], Int[Tensor, "K R"]]:
    """Logits and drafted tokens of `STEPS` steps over one random text of `TOKENS` tokens."""
    generator = torch.Generator().manual_seed(0)
    # Rows of the table are windows of one random vector: a whole one would be the largest tensor by far.
    table = torch.randn(shape.vocab_size + shape.hidden_size, generator=generator)
    drafter = load(table.as_strided((shape.vocab_size, shape.hidden_size), (1, 1)))
    aux = torch.randn(TOKENS, len(shape.capture_layers) * shape.hidden_size, generator=generator)
    tokens = torch.randint(shape.vocab_size, (TOKENS,), generator=generator)
    rows = torch.arange(TOKENS - STEPS)
    index = rows + 1 + torch.arange(STEPS)[:, None]
    states = ttt.unroll(
        drafter, aux, tokens, torch.arange(TOKENS), torch.zeros(1, TOKENS, dtype=torch.long), rows, index
    )
    logits = drafter.lm_head(drafter.norm(torch.stack(states)))
    return logits, drafter.target_ids(logits.argmax(-1))
