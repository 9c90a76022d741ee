"""What every engine offers: token ids in, hidden states or answers out, in the order of the batch."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor


class EngineError(RuntimeError):
    """The engine failed on this batch; a smaller batch or another try may succeed."""


class EngineGone(EngineError):
    """The engine cannot work at all: nothing is to be tried again, and no sample is to blame."""


class SomeFailed(EngineError):
    """Some requests of a batch failed: in `results`, each has its EngineError where the others have their result."""

    def __init__(self, results: Sequence[Any]) -> None:
        self.results = list(results)
        errors = [result for result in self.results if isinstance(result, EngineError)]
        assert errors, "raised only if something failed"
        super().__init__(f"{len(errors)} of {len(self.results)} requests failed, the first: {errors[0]}")


@dataclass(frozen=True)
class Captured:
    """Hidden states of one sequence of T tokens, on the CPU; perhaps views of the whole batch's tensor."""

    aux: Float[Tensor, "T AH"]
    """Inputs of the captured layers, side by side in the order of capture_layers."""
    last: Float[Tensor, "T H"]
    """After the final norm: what the head reads."""


@dataclass(frozen=True)
class Generated:
    """One answer: finish_reason "stop" if it ends its turn, "length" if the limit came first."""

    ids: list[int]
    finish_reason: str


@runtime_checkable
class Engine(Protocol):
    """Runs the verifier. `name` and `version` go into the store's manifest."""

    name: str
    version: str

    def capture(self, batch: Sequence[Sequence[int]]) -> list[Captured]:
        """States of every token of every sequence.

        Raises EngineError if they are incomplete or not finite; SomeFailed says of which sequences, if that is known.
        """

    def generate(
        self,
        batch: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        stop_ids: Collection[int],
    ) -> list[Generated]:
        """One answer to every prompt; temperature 0 is greedy: no randomness, no penalty, no filter."""

    def close(self) -> None:
        """Frees the model; the engine cannot be used afterwards."""


def ahead_of(engine: Engine) -> int:
    """Batches that an engine elsewhere may be given at once, so that it never waits for us; 0 if it works in here."""
    ahead: int = getattr(engine, "ahead", 0)
    return ahead


def starting_s(engine: Engine) -> float:
    """Seconds that work has waited so far for the engine to start; no work of its own, however long it takes."""
    seconds: float = getattr(engine, "starting_s", 0.0)
    return seconds


@runtime_checkable
class Rechecks(Protocol):
    """An engine whose states come a long way, and are proven before it is believed that a store is complete."""

    def recheck(self, stored: Sequence[tuple[Sequence[int], Captured]], dtype: torch.dtype) -> dict[str, Any]:
        """Extracts sequences again, each alone, and compares with what was stored in `dtype`.

        Returns figures for the manifest; EngineError if they differ by more than rounding.
        """


@runtime_checkable
class Prepares(Protocol):
    """An engine that takes long to get ready, for answers or for states, and can do so while others work."""

    def prepare(self, life: Literal["respond", "capture"]) -> None:
        """Returns when it is ready; raises what `generate` or `capture` would."""


@dataclass(frozen=True)
class Completion:
    """One greedy answer of a server. The last two are empty where it decodes without a drafter."""

    ids: tuple[int, ...]
    """With the end-of-turn token, if there is one."""
    finish_reason: str
    """stop or length."""
    accepted: tuple[int, ...]
    """Drafts that each verification accepted, those past the end of the answer included."""
    drafted: tuple[int, ...]
    """Drafts that each verification was given."""
    seconds: float


@dataclass(frozen=True)
class Counters:
    """A server's own totals of speculative decoding since its start."""

    drafts: int
    """Verifications: chains of drafts that the verifier has read."""
    draft_tokens: int
    accepted: int
    accepted_per_pos: tuple[int, ...]
    """How many verifications accepted the draft at each position."""
