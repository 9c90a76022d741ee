"""The acceptance of a finished text as training computes it: captured states, TTT unroll, replay. And its agreement
with what decoding counted, row by row: two ways through the same network that share no loop and no cache.

Legend: T tokens of prompt and response, R rows that draft (response tokens but the last), K drafts, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from eagle3 import ttt
from eagle3.decode import Round
from eagle3.drafter import Eagle3Drafter
from eagle3.metrics import replay, response_starts, right_steps
from eagle3.supervision import Supervision, supervise
from eagle3.truth import TIE
from extract.verifier import text_backbone

PAIRS_AT_ONCE = 1024
"""Rows of the drafter's head computed at once."""


class ReplayDiffers(RuntimeError):
    """Decoding and training computed different drafts for one row: a fault of this program, not of the drafter."""


@dataclass(frozen=True)
class Capture:
    """One finished text with the verifier's states, from a single forward over it."""

    prompt_tokens: int
    input_ids: Int[Tensor, "T"]
    aux: Float[Tensor, "T AH"]
    logits: Float[Tensor, "R1 V"]
    """The verifier's, one row for each response token: what it said where that token was chosen."""

    def plan(self, drafter: Eagle3Drafter, steps: int) -> Supervision:
        """Row sets by the rules of training."""
        mask = (torch.arange(len(self.input_ids), device=self.aux.device) >= self.prompt_tokens)[None]
        top1 = torch.zeros_like(self.input_ids)
        top1[self.prompt_tokens - 1 : -1] = self.logits.argmax(-1)
        return supervise(self.input_ids[None], mask, self._document(), top1[None], drafter.t2d, steps)

    def _document(self) -> Int[Tensor, "1 T"]:
        return torch.zeros_like(self.input_ids)[None]

    def starts(self, plan: Supervision) -> Tensor:
        return response_starts(plan.rows, self._document())


@torch.inference_mode()
def capture(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    capture_layers: Sequence[int],
) -> Capture:
    """The states of a finished text. They are the model's own hidden_states[k], so not even a hook is shared with
    decoding."""
    head = model.get_output_embeddings()
    ids = torch.tensor([*prompt_ids, *response_ids], device=head.weight.device)
    out = text_backbone(model)(input_ids=ids[None], use_cache=False, output_hidden_states=True)
    aux = torch.cat([out.hidden_states[k][0] for k in capture_layers], dim=-1)
    logits = head(out.last_hidden_state[0, len(prompt_ids) - 1 : -1])
    return Capture(len(prompt_ids), ids, aux, logits)


@dataclass(frozen=True)
class Drafts:
    """What the drafter drafts at every active row, fed the true tokens."""

    tokens: Int[Tensor, "K R"]
    """Verifier ids."""
    lead: Float[Tensor, "K R"]
    """How far the best logit lies above the second, relative to the largest in size: below `TIE` it is a tie."""


@torch.inference_mode()
def drafts_of(
    drafter: Eagle3Drafter, text: Capture, plan: Supervision, aux: Float[Tensor, "T AH"] | None = None
) -> Drafts:
    """Drafts by the TTT unroll that training runs. `aux` in place of the captured states, for controls."""
    document = torch.zeros_like(text.input_ids)[None]
    position = torch.arange(len(text.input_ids), device=text.aux.device)
    aux = text.aux if aux is None else aux
    states = torch.stack(ttt.unroll(drafter, aux, text.input_ids, position, document, plan.rows, plan.index))
    tokens, leads = [], []
    for chunk in states.flatten(0, 1).split(PAIRS_AT_ONCE):
        logits = drafter.lm_head(drafter.norm(chunk))
        best, ids = logits.topk(min(2, logits.shape[-1]), dim=-1)
        tokens.append(drafter.target_ids(ids[:, 0]))
        leads.append((best[:, 0] - best[:, -1]) / logits.abs().amax(-1))
    shape = plan.index.shape
    return Drafts(torch.cat(tokens).view(shape), torch.cat(leads).view(shape))


def agree(name: str, rounds: Sequence[Round], text: Capture, plan: Supervision, drafts: Drafts) -> tuple[Drafts, int]:
    """Checks that decoding drafted, row by row, what training computes. Returns the drafts and the ties in them.

    Compared are all drafts up to the first wrong one of a round: behind it the two read different tokens by design.
    At a tie the decoder's choice stands.

    Raises:
        ReplayDiffers: naming prompt, row and step.
    """
    tokens, ties = drafts.tokens.clone(), 0
    expected = text.prompt_tokens - 1
    for r in rounds:
        if r.row != expected:
            raise ReplayDiffers(f"prompt {name}: decoding visited row {r.row}, the replay row {expected}")
        column = expected - (text.prompt_tokens - 1)
        for k, draft in enumerate(r.drafts[: r.accepted + 1]):
            if not bool(plan.active[k, column]) or int(tokens[k, column]) == draft:
                continue
            if float(drafts.lead[k, column]) > TIE:
                raise ReplayDiffers(
                    f"prompt {name}, row {expected}, step {k}: decoding drafted token {draft}, training computes "
                    f"{int(tokens[k, column])}, ahead by {float(drafts.lead[k, column]):.1e} of the largest logit "
                    f"(a float32 tie is {TIE:.0e})"
                )
            tokens[k, column] = draft
            ties += 1
        expected += r.accepted + 1
    return Drafts(tokens, drafts.lead), ties


def count(text: Capture, plan: Supervision, tokens: Int[Tensor, "K R"]) -> tuple[int, list[int]]:
    """Rows visited and drafts accepted at each position, when greedy serving of this text is replayed."""
    if not len(plan.rows):
        return 0, [0] * len(plan.index)
    [(visited, by_position)] = replay(right_steps(tokens, plan), text.starts(plan))
    return visited, by_position
