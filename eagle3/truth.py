"""Plain greedy decoding, which speculative decoding must reproduce token by token, and the judgement of differences.

Two forwards of one model over the same tokens differ by rounding when their shapes differ. Where the verifier's two
best logits lie closer than that, its greedy choice depends on the shape: a tie. Anything else that differs is a fault.
Legend: R response tokens, V vocabulary, B prompts of a batch.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from eagle3.decode import cache_keyword
from extract.verifier import text_backbone

TIE = 2e-5
"""Logits closer than this, relative to the largest one, are equal in float32 after some hundred additions a layer.

Measured with SmolLM2-135M: one forward of many rows against one of a few moves logits by at most 4e-6 of the largest.
"""


BF16_TIE_ULPS = 2.0
"""An engine in bf16 may take a token whose float32 logit lies so many bf16 steps below the best one.

Measured with SmolLM2-135M on 3,456 tokens that transformers, vLLM and SGLang wrote in bf16: at most 1.4.
"""


class OutputDiffers(RuntimeError):
    """Speculative and plain greedy decoding gave different texts: a fault of this program, not of the drafter."""


@torch.inference_mode()
def plain_greedy(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    end_of_turn_ids: Collection[int],
) -> list[list[int]]:
    """One response to every prompt, one token at a time, in one batch padded on the left."""
    backbone, head = text_backbone(model), model.get_output_embeddings()
    device, width = head.weight.device, max(len(ids) for ids in prompts)
    padding = torch.tensor([width - len(ids) for ids in prompts], device=device)
    tokens = torch.tensor([[0] * (width - len(ids)) + list(ids) for ids in prompts], device=device)
    mask = (torch.arange(width, device=device) >= padding[:, None]).long()
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = {cache_keyword(backbone): DynamicCache()}
    responses: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    for _ in range(max_new_tokens):
        out = backbone(input_ids=tokens, attention_mask=mask, position_ids=position, use_cache=True, **cache)
        tokens = head(out.last_hidden_state[:, -1:]).argmax(-1)
        for i, token in enumerate(tokens[:, 0].tolist()):
            if not ended[i]:
                responses[i].append(token)
                ended[i] = token in end_of_turn_ids
        if all(ended):
            break
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=-1)
        position = position[:, -1:] + 1
    return responses


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two responses part; None if they are equal. One that ends early parts at its end."""
    for at, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return at
    return None if len(a) == len(b) else min(len(a), len(b))


def judge(
    name: str,
    response: Sequence[int],
    plain: Sequence[int],
    logits: Float[Tensor, "R V"],
) -> int:
    """How many float32 ties explain that `response` is not `plain`, the verifier alone at batch 1; 0 if it is.

    `logits[i]`: the verifier's for response token i, from one forward over the finished text. Behind a tie the two
    texts have different histories, so from there on every token must be the verifier's choice on its own history.

    Raises:
        OutputDiffers: naming prompt, position, both tokens and their distance.
    """
    at = first_difference(response, plain)
    if at is None:
        return 0
    if at == min(len(response), len(plain)):
        raise OutputDiffers(
            f"prompt {name}: speculative decoding gave {len(response)} tokens, plain greedy decoding {len(plain)}, "
            f"and the first {at} are equal: one of them did not stop where it had to"
        )
    short = shortfall(logits[at:], response[at:])
    theirs = shortfall(logits[at : at + 1], plain[at : at + 1])
    worst = int(short.argmax())
    if float(short[worst]) > TIE or float(theirs[0]) > TIE:
        raise OutputDiffers(
            f"prompt {name}: speculative and plain greedy decoding part at response token {at} "
            f"({response[at]} against {plain[at]}), and this is no float32 tie: {response[at + worst]} at token "
            f"{at + worst} lies {float(short[worst]):.1e} of the largest logit below the verifier's choice (a tie is "
            f"{TIE:.0e})"
        )
    return 1 + int((logits[at + 1 :].argmax(-1).cpu() != torch.tensor(response[at + 1 :])).sum())


def shortfall(logits: Float[Tensor, "R V"], tokens: Sequence[int]) -> Float[Tensor, "R"]:
    """How far the logit of each token lies below the best one, relative to the largest logit in size."""
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    return (logits.amax(-1) - chosen) / logits.abs().amax(-1)


@dataclass(frozen=True)
class Parting:
    """Where two greedy texts of one engine part, and how far apart the verifier sees the two tokens."""

    at: int
    tokens: tuple[int | None, int | None]
    """None: that text has ended."""
    ulps: float
    """bf16 steps by which the worse of the two lies below the verifier's best logit; infinite if one text ended."""

    @property
    def tie(self) -> bool:
        return self.ulps <= BF16_TIE_ULPS


def parting(response: Sequence[int], other: Sequence[int], logits: Float[Tensor, "R V"]) -> Parting | None:
    """The first difference of two texts; None if they are equal.

    `logits`: the verifier's in float32, one row for each token of `response`. What follows the first difference has
    another history and says nothing.
    """
    at = first_difference(response, other)
    if at is None:
        return None
    tokens = [text[at] if at < len(text) else None for text in (response, other)]
    there = [token for token in tokens if token is not None]
    if len(there) < 2:
        return Parting(at, (tokens[0], tokens[1]), math.inf)
    ulps = shortfall_ulps(logits[at : at + 1].expand(2, -1), there)
    return Parting(at, (tokens[0], tokens[1]), float(ulps.max()))


def shortfall_ulps(logits: Float[Tensor, "R V"], tokens: Sequence[int]) -> Float[Tensor, "R"]:
    """How far the logit of each token lies below the best one, in bf16 steps at the best one."""
    best = logits.float().amax(-1)
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    # bf16 keeps 8 bits of the mantissa, the leading one included.
    return (best - chosen) / torch.ldexp(torch.ones_like(best), torch.frexp(best).exponent - 8)
