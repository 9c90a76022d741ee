"""Plain greedy decoding, which speculative decoding must reproduce token by token, and the judgement of differences.

Two forwards of one model over the same tokens differ by rounding when their shapes differ. Where the verifier's two
best logits lie closer than that, its greedy choice depends on the shape: a tie. Anything else that differs is a fault.
Legend: R response tokens, V vocabulary, B prompts of a batch.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

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
    """bf16 steps by which the worse of the two lies below the verifier's best logit; infinite if one text ended.

    Of the verifier in float32, or in the precision in which it is served, whichever sees them closer together.
    """

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
    return Parting(at, (tokens[0], tokens[1]), _worse(logits[at], there))


def second_look(
    parted: Parting, served: PreTrainedModel, prompt_ids: Sequence[int], response: Sequence[int]
) -> Parting:
    """The same parting as `served` sees it, the verifier in the engine's precision, fed one token at a time.

    float32 tells apart what bf16 rounds together: with SmolLM2-135M two tokens that vLLM took for each other lay 2.8
    bf16 steps apart in float32, and had the same logit in bf16.
    """
    there = [token for token in parted.tokens if token is not None]
    if len(there) < 2:
        return parted
    logits = _next_logits(served, prompt_ids, response[: parted.at])
    return replace(parted, ulps=min(parted.ulps, _worse(logits, there)))


@torch.inference_mode()
def _next_logits(model: PreTrainedModel, prompt_ids: Sequence[int], response: Sequence[int]) -> Float[Tensor, "V"]:
    backbone, head = text_backbone(model), model.get_output_embeddings()
    cache = {cache_keyword(backbone): DynamicCache()}
    for fed in (prompt_ids, *([token] for token in response)):
        ids = torch.tensor([list(fed)], device=head.weight.device)
        last = backbone(input_ids=ids, use_cache=True, **cache).last_hidden_state[0, -1]
    return head(last).float()


def _worse(logits: Float[Tensor, "V"], tokens: Sequence[int]) -> float:
    return float(shortfall_ulps(logits.expand(len(tokens), -1), tokens).max())


def shortfall_ulps(logits: Float[Tensor, "R V"], tokens: Sequence[int]) -> Float[Tensor, "R"]:
    """How far the logit of each token lies below the best one, in bf16 steps at the best one."""
    best = logits.float().amax(-1)
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    # bf16 keeps 8 bits of the mantissa, the leading one included.
    return (best - chosen) / torch.ldexp(torch.ones_like(best), torch.frexp(best).exponent - 8)
