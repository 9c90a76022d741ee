"""Why an engine's counts may differ from training's: each likely cause is tried on the engine's own text.

A suspect is the replay with one fault put in on purpose. The one whose counts come closest to the engine's is the
first place to look. In the order in which such faults occur: layer ids, vocabulary map, norms, RoPE, shift.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle3 import replayed
from eagle3.drafter import DrafterShape, Eagle3Drafter
from eagle3.gate import Counts, total
from eagle3.vocab import DraftVocab

Text = tuple[Sequence[int], Sequence[int]]
"""Ids of a prompt and of the response to it."""
Recapture = Callable[[Text, Sequence[int]], replayed.Capture]
"""Captured states of a text at other layers."""


@dataclass(frozen=True)
class Suspect:
    """One fault, and what the drafter would score with it."""

    cause: str
    look_at: str
    counts: Counts

    def distance(self, engine: Counts) -> float:
        """Largest difference of a rate at one position from the engine's."""
        return max(abs(a - b) for a, b in zip(self.counts.rates, engine.rates, strict=True))


def suspects(
    drafter: Eagle3Drafter, texts: Sequence[Text], capture: Recapture, steps: int, num_layers: int
) -> list[Suspect]:
    """Every fault tried on every text, in the order of the module's docstring."""
    found = []
    for cause, look_at, faulty, layers in _faults(drafter, num_layers):
        counts = []
        for text in texts:
            states = capture(text, layers)
            plan = states.plan(faulty, steps)
            aux = states.aux.roll(1, 0) if cause == SHIFT else states.aux
            drafts = replayed.drafts_of(faulty, states, plan, aux)
            verified, accepted = replayed.count(states, plan, drafts.tokens)
            counts.append(Counts(verified, tuple(accepted)))
        found.append(Suspect(cause, look_at, total(counts)))
    return found


SHIFT = "states of the row before"


def _faults(drafter: Eagle3Drafter, num_layers: int) -> Iterator[tuple[str, str, Eagle3Drafter, Sequence[int]]]:
    shape, layers = drafter.shape, drafter.shape.capture_layers
    for step, name in ((-1, "one layer too early"), (1, "one layer too late")):
        moved = [k + step for k in layers]
        if all(1 <= k < num_layers for k in moved):
            yield f"layer ids: {name}", "eagle_aux_hidden_state_layer_ids, nested and top-level", drafter, moved
    absolute = torch.arange(shape.draft_vocab_size) + drafter.d2t.cpu()
    identity = torch.zeros_like(drafter.d2t)
    yield "vocabulary map: not read", "d2t and its name", altered(drafter, {"d2t": identity}), layers
    clipped = absolute.clamp(max=shape.vocab_size - 1 - torch.arange(shape.draft_vocab_size))
    yield "vocabulary map: ids taken for offsets", "d2t: offsets", altered(drafter, {"d2t": clipped}), layers
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm"):
        ones = {f"{name}.weight": torch.ones_like(drafter.get_parameter(f"{name}.weight"))}
        yield f"norms: {name} not read", f"{name}.weight and its name", altered(drafter, ones), layers
    other = replace(shape, norm_output=not shape.norm_output)
    fed = "pre-norm for post-norm" if shape.norm_output else "post-norm for pre-norm"
    yield f"norms: next step fed {fed}", "norm_output", altered(drafter, {}, other), layers
    default = replace(shape, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    if default != shape:
        yield "RoPE: base 10,000 and no scaling", "rope_theta, rope_scaling", altered(drafter, {}, default), layers
    yield SHIFT, "how the engine pairs states and tokens", drafter, layers


def altered(drafter: Eagle3Drafter, tensors: Mapping[str, Tensor], shape: DrafterShape | None = None) -> Eagle3Drafter:
    """A drafter of another shape or with other tensors; all that is not named is shared, not copied."""
    device = drafter.lm_head.weight.device
    vocab = DraftVocab(torch.arange(drafter.shape.draft_vocab_size), drafter.shape.vocab_size, None)
    other = Eagle3Drafter(shape or drafter.shape, vocab, drafter.embedding).to(device)
    told = {name: tensor.to(device) for name, tensor in tensors.items()}
    other.load_state_dict({**drafter.state_dict(), **told}, assign=True)
    return other.eval()
