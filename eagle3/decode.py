"""Greedy speculative decoding in process: the verifier and an EAGLE-3 drafter, both with a KV cache, batch 1.

One round: the drafter proposes a chain of K tokens, one forward of the verifier over the last token and the drafts
says which are right, and those and the verifier's own next token are kept. So the output is that of plain greedy
decoding. A draft counts only inside the response: none behind an end-of-turn token or beyond `max_new_tokens`.
Legend: L tokens fed, H hidden, A captured layers, V vocabulary, K drafts a round.
"""

import inspect
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from eagle3.drafter import Eagle3Drafter
from eagle3.step import all_of, angles_at, embedding_half, finish, heads_of, matrices_of, normed_state
from extract.verifier import decoder_layers, text_backbone


@dataclass(frozen=True)
class Round:
    """One verification: at row `row` (the position whose state the drafter read) `drafts` were proposed."""

    row: int
    drafts: tuple[int, ...]
    accepted: int


@dataclass(frozen=True)
class Decoded:
    """One response. `rounds` has one entry a verification; the first response token comes from the prompt's forward."""

    response_ids: tuple[int, ...]
    rounds: tuple[Round, ...]
    prefill_s: float
    decode_s: float

    def accepted_by_position(self, drafts: int) -> list[int]:
        """How many verifications accepted the draft at each position of the chain."""
        return [sum(r.accepted > k for r in self.rounds) for k in range(drafts)]


class Verifier:
    """The verifier with its KV cache, and hooks that catch the captured layers of each forward. A context manager."""

    def __init__(self, model: PreTrainedModel, capture_layers: Sequence[int]):
        self._backbone, self._head = text_backbone(model), model.get_output_embeddings()
        if self._head is None:
            raise ValueError(f"{type(model).__name__} has no output head, so it cannot decode")
        layers = decoder_layers(model)
        wrong = [k for k in capture_layers if not 1 <= k < len(layers)]
        if wrong:
            raise ValueError(
                f"the drafter reads layers {list(capture_layers)}, but the verifier has {len(layers)}: "
                f"{wrong} cannot be captured; is verifier.path the model that the drafter was made for?"
            )
        self._caught: dict[int, Tensor] = {}
        self._layers, self._order = [(k, layers[k]) for k in capture_layers], tuple(capture_layers)
        self._cache_keyword = cache_keyword(self._backbone)
        self.device = self._head.weight.device

    def __enter__(self) -> "Verifier":
        self._hooks = [layer.register_forward_pre_hook(self._catch(k), with_kwargs=True) for k, layer in self._layers]
        self.reset()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self.reset()

    def reset(self) -> None:
        """Forgets the sequence."""
        # Without a config every layer keeps all its keys, so that any of them can be cropped; masks stay the model's.
        self._cache = DynamicCache()
        self._caught.clear()

    def forward(self, tokens: Sequence[int]) -> tuple[Float[Tensor, "L AH"], Float[Tensor, "L H"]]:
        """Feeds the tokens behind those in the cache: captured layers and final states (after the final norm)."""
        ids = torch.tensor([list(tokens)], device=self.device)
        out = self._backbone(input_ids=ids, use_cache=True, **{self._cache_keyword: self._cache})
        return torch.cat([self._caught[k][0] for k in self._order], dim=-1), out.last_hidden_state[0]

    def next_ids(self, last: Float[Tensor, "n H"]) -> list[int]:
        """The greedy choice after each state."""
        return self._head(last).argmax(-1).tolist()

    def drop(self, tokens: int) -> None:
        """Forgets the last so many tokens."""
        if tokens:
            self._cache.crop(-tokens)

    def _catch(self, k: int) -> Callable[[nn.Module, tuple, dict], None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            self._caught[k] = args[0] if args else kwargs["hidden_states"]

        return hook


class DraftCache:
    """The drafter's keys and values of one sequence.

    A row's step-0 keys are final; its own keys of later steps are written behind them and overwritten in the next
    round, so that the whole filled part is always what a query may see.
    """

    def __init__(self, drafter: Eagle3Drafter, capacity: int):
        self.drafter, self.rows = drafter, 0
        self._matrices = matrices_of(drafter)
        shape = drafter.shape
        size = (shape.num_kv_heads, capacity, shape.head_dim)
        device = drafter.lm_head.weight.device
        self._keys, self._values = torch.empty(size, device=device), torch.empty(size, device=device)

    def draft(self, aux: Float[Tensor, "L AH"], tokens: Sequence[int], steps: int) -> list[int]:
        """Adds L rows, then drafts a chain of `steps` tokens (verifier ids) from the last of them.

        Row r reads the verifier's state at r and token r+1: `tokens` are those of the new rows, the last one the
        newest token of the sequence.
        """
        drafter, first = self.drafter, self.rows
        h = drafter.fuse(aux)
        new = torch.tensor(list(tokens), device=h.device)
        position = torch.arange(first, first + len(h), device=h.device)
        self.rows += len(h)
        query = self._add(first, new, h, position)
        h, position = h[-1:], position[-1:]
        drafts: list[int] = []
        for k in range(steps):
            if k > 0:
                query = self._add(self.rows + k - 1, torch.tensor(drafts[-1:], device=h.device), h, position)
            state = finish(drafter, h, self._attend(query, self.rows + k), self._matrices)
            choice = drafter.lm_head(drafter.norm(state)).argmax(-1)
            drafts.append(int(drafter.target_ids(choice)))
            h, position = drafter.feed(state), position + 1
        return drafts

    def _add(
        self, at: int, tokens: Int[Tensor, "n"], h: Float[Tensor, "n H"], position: Int[Tensor, "n"]
    ) -> Float[Tensor, "1 heads hd"]:
        """Writes keys and values of rows from place `at` on, and gives the query of the last one."""
        drafter, matrices = self.drafter, self._matrices
        half, x = embedding_half(drafter, tokens, matrices), normed_state(drafter, h)
        query, key, value = heads_of(x, half, all_of(drafter.shape), matrices, angles_at(drafter, position))
        self._keys[:, at : at + len(h)] = key.transpose(0, 1)
        self._values[:, at : at + len(h)] = value.transpose(0, 1)
        return query[-1:]

    def _attend(self, query: Float[Tensor, "1 heads hd"], filled: int) -> Float[Tensor, "1 width"]:
        keys, values = self._keys[:, :filled], self._values[:, :filled]
        grouped = query.view(len(keys), -1, query.shape[-1]) * query.shape[-1] ** -0.5  # kv group hd
        weights = (grouped @ keys.transpose(1, 2)).softmax(-1)
        return (weights @ values).reshape(1, -1)


def cache_keyword(backbone: nn.Module) -> str:
    """What a backbone's forward calls its cache: transformers 5.24 renamed it, family by family."""
    return "cache" if "cache" in inspect.signature(backbone.forward).parameters else "past_key_values"


@torch.inference_mode()
def decode(
    verifier: Verifier,
    drafter: Eagle3Drafter,
    prompt_ids: Sequence[int],
    *,
    drafts: int,
    max_new_tokens: int,
    end_of_turn_ids: Collection[int],
    follow: Sequence[int] | None = None,
) -> Decoded:
    """One greedy response by speculative decoding; `follow` is a finished response to be led along instead."""

    def next_ids(last: Float[Tensor, "n H"]) -> list[int]:
        return verifier.next_ids(last) if follow is None else list(follow[len(response) :][: len(last)])

    began = time.perf_counter()
    verifier.reset()
    aux, last = verifier.forward(prompt_ids)
    response: list[int] = []
    response += next_ids(last[-1:])
    prefilled = time.perf_counter()
    cache = DraftCache(drafter, len(prompt_ids) + max_new_tokens + drafts)
    unread = [*prompt_ids[1:], response[0]]  # the tokens that the drafter's new rows read
    rounds: list[Round] = []
    while len(response) < max_new_tokens and response[-1] not in end_of_turn_ids:
        steps = min(drafts, max_new_tokens - len(response))
        proposed = cache.draft(aux, unread, steps)
        aux, last = verifier.forward([response[-1], *proposed])
        new, accepted = _accept(proposed, next_ids(last), end_of_turn_ids)
        rounds.append(Round(cache.rows - 1, tuple(proposed), accepted))
        # Kept in the cache are the token that was fed first and the accepted drafts; the newest token is not in it yet.
        verifier.drop(steps - accepted)
        aux = aux[: accepted + 1]
        unread = [*proposed[:accepted], new[-1]]
        response += new
    return Decoded(tuple(response[:max_new_tokens]), tuple(rounds), prefilled - began, time.perf_counter() - prefilled)


def _accept(proposed: Sequence[int], chosen: Sequence[int], end_of_turn_ids: Collection[int]) -> tuple[list[int], int]:
    """New tokens of a round and the number of drafts among them; nothing follows an end-of-turn token."""
    accepted = 0
    for draft, choice in zip(proposed, chosen, strict=False):
        if draft != choice:
            break
        accepted += 1
        if draft in end_of_turn_ids:
            return list(proposed[:accepted]), accepted
    return list(chosen[: accepted + 1]), accepted
