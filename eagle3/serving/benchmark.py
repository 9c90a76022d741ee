"""Measures a running server: one stream alone, long prompts, and many requests at once.

Warm-up first, then repeats. Tokens are counted by the server, seconds here, at its other end.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eagle3.config import Serving
from eagle3.serving.figures import Measured, Repeated, Rows
from eagle3.serving.load import Answer, Load, Round
from eagle3.serving.phases import phase
from eagle3.serving.prompts import Prompts
from extract.launcher import ServerError

Reading = Callable[[Round], dict[str, float]]
"""From the requests of one repeat to its figures."""


@dataclass
class Benchmark:
    """All phases on one server; `advance` is told of every repeat."""

    load: Load
    prompts: Prompts
    wanted: Serving
    rows: Rows
    drafts: bool
    """Whether the server has a drafter."""
    advance: Callable[[int], None]

    def __post_init__(self) -> None:
        self._verifications = self._accepted = 0

    def measure(self, start_s: float) -> Measured:
        """Every figure; `start_s` is how long the server took to start.

        Raises:
            ServerError: it died, hung, answered nothing in a phase, or drafts nothing with a drafter; the phase
                stands at the beginning of its words.
        """
        wanted = self.wanted
        with phase("single"):
            single = self._repeat(self._single, read_single)
            self.rows.repeats("single", single)
        with phase("prefill"):
            prefill = self._repeat(self._prefill, lambda done: read_prefill(done, wanted.prefill_tokens))
            self.rows.repeats("prefill", prefill)
        load = {}
        for clients in wanted.concurrencies:
            with phase(f"load at {clients}"):
                load[clients] = self._repeat(lambda clients=clients: self._at(clients), read_load)  # type: ignore[misc]
                self.rows.load(clients, load[clients])
        measured = Measured(start_s, single, prefill, load, self._accept_len())
        self.rows.result(measured)
        return measured

    def _single(self) -> Round:
        asked = self.prompts.take(self.wanted.single_requests)
        return self.load.round(asked, at_once=1, new_tokens=self.wanted.new_tokens, stream=True)

    def _prefill(self) -> Round:
        asked = self.prompts.long(self.wanted.prefill_requests, self.wanted.prefill_tokens)
        return self.load.round(asked, at_once=1, new_tokens=1, stream=False)

    def _at(self, clients: int) -> Round:
        asked = self.prompts.take(clients * self.wanted.requests_per_client)
        return self.load.round(asked, at_once=clients, new_tokens=self.wanted.new_tokens, stream=False)

    def _repeat(self, one: Callable[[], Round], read: Reading) -> Repeated:
        rows, requests, failures = [], 0, list[str]()
        for number in range(self.wanted.warmup + self.wanted.repeats):
            done = one()
            self.advance(1)
            if not done.answers:
                raise ServerError(f"none of {len(done.failures)} requests was answered; the first: {done.failures[0]}")
            requests += len(done.answers) + len(done.failures)
            failures += done.failures
            if number < self.wanted.warmup:
                continue
            rows.append(read(done))
            self._verifications += sum(answer.heard.verifications for answer in done.answers)
            self._accepted += sum(answer.heard.accepted for answer in done.answers)
        return Repeated(tuple(rows), requests, len(failures), failures[0] if failures else "")

    def _accept_len(self) -> float | None:
        if not self.drafts:
            return None
        if not self._verifications:
            raise ServerError(
                "the server was given a drafter, and no answer tells of a verification: it does not draft"
            )
        return 1 + self._accepted / self._verifications


def rounds_of(wanted: Serving) -> int:
    """How often `Benchmark.advance` will be called."""
    return (2 + len(wanted.concurrencies)) * (wanted.warmup + wanted.repeats)


def read_single(done: Round) -> dict[str, float]:
    """Tokens after the first piece of an answer, over the seconds from there to its last token; pooled.

    The seconds until the first piece are those of the prompt, and told apart.
    """
    tokens = sum(answer.heard.tokens - answer.first_tokens for answer in done.answers)
    seconds = sum(answer.last_s - answer.first_s for answer in done.answers)
    if not tokens:
        raise ServerError("every answer came in one piece, so decoding cannot be told from prefill: it does not stream")
    return {"decode_tok_s": tokens / seconds, "ttft_ms": 1000 * statistics.median(_of(done.answers, "first_s"))}


def read_prefill(done: Round, prompt_tokens: int) -> dict[str, float]:
    """Prompt tokens over the seconds until the one token that was asked for, one prompt at a time."""
    return {"prefill_tok_s": prompt_tokens * len(done.answers) / sum(_of(done.answers, "last_s"))}


def read_load(done: Round) -> dict[str, float]:
    """New tokens of all answers over the seconds from the first request to the last answer, lost ones included."""
    tokens = sum(answer.heard.tokens for answer in done.answers)
    return {"tok_s": tokens / done.wall_s, "latency_s": statistics.median(_of(done.answers, "last_s"))}


def _of(answers: Sequence[Answer], name: str) -> list[float]:
    return [getattr(answer, name) for answer in answers]
