"""How each engine is asked for a number of tokens, and what it says of them.

Greedy, and `ignore_eos`, so that every answer is as long as any other. Each request has a cache of its own: a prompt
that was read before is read again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Heard:
    """What is known of an answer so far."""

    tokens: int = 0
    verifications: int = 0
    """Of drafts; 0 without a drafter."""
    accepted: int = 0
    """Drafts."""


class Dialect(Protocol):
    """One engine's HTTP interface."""

    path: str

    def body(self, ids: Sequence[int], new_tokens: int, *, own: str, stream: bool) -> dict[str, Any]:
        """A request whose prompt shares no cache with another, whose `own` is another one."""

    def heard(self, said: dict[str, Any], before: Heard) -> Heard:
        """After one more piece of an answer, or a whole one. KeyError, TypeError or IndexError if it is none."""


class Sglang:
    """`/generate`: a stream's pieces count all tokens from the beginning."""

    path = "/generate"

    def body(self, ids: Sequence[int], new_tokens: int, *, own: str, stream: bool) -> dict[str, Any]:
        sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        return {"input_ids": list(ids), "sampling_params": sampling, "stream": stream, "extra_key": own}

    def heard(self, said: dict[str, Any], before: Heard) -> Heard:
        meta = said["meta_info"]
        if "spec_verify_ct" not in meta:
            return Heard(meta["completion_tokens"])
        return Heard(meta["completion_tokens"], meta["spec_verify_ct"], meta["spec_num_correct_drafts"])


@dataclass(frozen=True)
class Vllm:
    """`/v1/completions`: a stream's pieces hold the new tokens."""

    name: str
    path = "/v1/completions"

    def body(self, ids: Sequence[int], new_tokens: int, *, own: str, stream: bool) -> dict[str, Any]:
        return {
            "model": self.name, "prompt": list(ids), "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True,
            "add_special_tokens": False, "return_token_ids": True, "cache_salt": own, "stream": stream,
        }  # fmt: skip

    def heard(self, said: dict[str, Any], before: Heard) -> Heard:
        new = len(said["choices"][0]["token_ids"] or ()) if said["choices"] else 0
        told = (said.get("metrics") or {}).get("speculative_decoding")
        if told is None:
            return Heard(before.tokens + new, before.verifications, before.accepted)
        accepted = sum(told["per_step_accepted"] or ()) if told["num_spec_steps"] else 0
        return Heard(before.tokens + new, told["num_spec_steps"], accepted)
