"""The stages of extraction: plan, respond, capture, teach. Each goes on where an earlier run stopped.

    prompts ─respond─▶ responses.jsonl ─capture─▶ shards/ ─teach─▶ shards/*.teacher.safetensors

Samples are built from the journal one conversation at a time, so memory does not grow with their number.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from extract.ahead import in_order
from extract.chat import Chat, Sample, Turn, build_samples
from extract.dialogue import count_turns
from extract.engines import Captured, Engine
from extract.engines.base import ahead_of, starting_s
from extract.journal import Journal
from extract.progress import Progress
from extract.prompts import Conversation, Skipped
from extract.respond import Sampling, respond
from extract.retry import Failure, Patience
from extract.store import StoredSample
from extract.store_writer import StoreWriter
from extract.teacher import teacher_pass

log = logging.getLogger(__name__)

WINDOW = 2048
"""Samples sorted by length at a time, so that a capturing batch holds sequences of like length."""


@dataclass(frozen=True)
class StageFigures:
    """What a stage did in this run; what an earlier run had done is in `reused`."""

    done: int
    tokens: int
    reused: int
    seconds: float
    """Of work; from its first request on, where an engine had to start."""
    start_s: float
    """That it waited for the engine to start."""

    @property
    def tokens_per_s(self) -> float | None:
        """None where nothing was left to do."""
        return self.tokens / self.seconds if self.tokens and self.seconds > 0 else None

    def values(self) -> dict[str, float]:
        """For the run log."""
        values: dict[str, float] = asdict(self)
        if self.tokens_per_s is not None:
            values["tokens_per_s"] = self.tokens_per_s
        return values


class Clock:
    """Of a stage: seconds of work, and seconds in which it waited for its engine to start."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._began, self._waited_before = time.monotonic(), starting_s(engine)

    def waited_s(self) -> float:
        return starting_s(self._engine) - self._waited_before

    def worked_s(self) -> float:
        return time.monotonic() - self._began - self.waited_s()


def answer_all(
    engine: Engine, chat: Chat, conversations: Sequence[Conversation], journal: Journal, *,
    sampling: Sampling, verifier_sha256: str, max_len: int, concurrency: int, keep_given: bool,
) -> tuple[StageFigures, list[Skipped]]:  # fmt: skip
    """Every turn that the verifier has to answer is answered and in the journal."""
    turns = tokens = reused = 0
    skipped: list[Skipped] = []
    clock = Clock(engine)
    events = respond(
        engine, chat, conversations, journal, sampling=sampling, verifier_sha256=verifier_sha256,
        max_len=max_len, batch_size=concurrency, keep_given=keep_given,
    )  # fmt: skip
    # Given answers that are kept pass through the journal too, and are counted by the events.
    every = sum(len(conversation.exchanges()) for conversation in conversations)
    total = every if keep_given else count_turns(conversations, keep_given=False)
    with Progress("respond", total, unit="turns", waited_s=clock.waited_s) as progress:
        for event in events:
            skipped += event.skipped
            if event.reused:
                reused += event.turns
                progress.skip(event.turns)
                continue
            turns, tokens = turns + event.turns, tokens + event.response_tokens
            rate = round(tokens / max(clock.worked_s(), 1e-9))
            progress.advance(event.turns, **{"tokens/s": rate} if tokens else {})
    return StageFigures(turns, tokens, reused, clock.worked_s(), clock.waited_s()), skipped


def samples_of(journal: Journal, conversations: Sequence[Conversation], *, max_len: int) -> Iterator[Sample | Skipped]:
    """The samples of all conversations, in their order, from the journal."""
    for conversation in conversations:
        turns = []
        for number in range(len(conversation.exchanges())):
            if (conversation.id, number) in journal:
                record = journal.get(conversation.id, number)
                turns.append(Turn(**{name: record[name] for name in Turn.__dataclass_fields__}))
        samples, skipped = build_samples(conversation.id, turns, max_len=max_len)
        yield from samples
        yield from skipped


@dataclass(frozen=True)
class CapturePlan:
    """What will be captured, exactly: known once all answers are there."""

    ids: tuple[str, ...]
    conversations: int
    tokens: int
    supervised: int
    longest: int
    preview: Sample
    skipped: tuple[Skipped, ...]


def plan_capture(found: Iterable[Sample | Skipped], limit_hint: str) -> CapturePlan:
    """Counts the samples. ValueError if there are none: `limit_hint` says what to look at."""
    ids: list[str] = []
    conversations: set[str] = set()
    skipped: list[Skipped] = []
    tokens = supervised = longest = 0
    preview: Sample | None = None
    for sample in found:
        if isinstance(sample, Skipped):
            skipped.append(sample)
            continue
        preview = preview or sample
        ids.append(sample.id)
        conversations.add(sample.conversation)
        tokens += len(sample.input_ids)
        supervised += sum(sample.loss_mask)
        longest = max(longest, len(sample.input_ids))
    if preview is None:
        why = f"; the first skipped is {skipped[0].id}: {skipped[0].reason}" if skipped else ""
        raise ValueError(f"no sample has a token written by the assistant{why}; {limit_hint}")
    return CapturePlan(tuple(ids), len(conversations), tokens, supervised, longest, preview, tuple(skipped))


def capture_all(
    engine: Engine, samples: Iterable[Sample], writer: StoreWriter, *,
    total_tokens: int, batch_tokens: int, dtype: torch.dtype,
) -> StageFigures:  # fmt: skip
    """Every sample that the store lacks is captured and on disk, or in quarantine with its reason."""
    captured = tokens = reused = 0
    clock = Clock(engine)
    patience = Patience()

    def states_of(batch: list[Sample]) -> list[Captured | Failure]:
        return patience.run(engine.capture, [sample.input_ids for sample in batch])

    with Progress("capture", total_tokens, unit="tokens", waited_s=clock.waited_s) as progress:
        for window in _windows(samples):
            present = {s.id for s in window if s.id in writer.done or s.id in writer.quarantined}
            reused += len(present)
            progress.skip(sum(len(s.input_ids) for s in window if s.id in present))
            # A batch that a crash cut is run whole again: states depend, in the last bits, on the batch's shape.
            open_batches = (b for b in batches(window, batch_tokens) if any(s.id not in present for s in b))
            for batch, results in in_order(states_of, open_batches, ahead_of(engine)):
                missing = [sample for sample in batch if sample.id not in present]
                for sample, states in zip(batch, results, strict=True):
                    if sample.id not in present:
                        _store(writer, sample, states, dtype)
                count = sum(len(sample.input_ids) for sample in missing)
                captured, tokens = captured + len(missing), tokens + count
                progress.advance(count)
        writer.flush()
    if patience.failures:
        log.warning("%d requests for states failed; they were repeated, or their samples given up", patience.failures)
    return StageFigures(captured, tokens, reused, clock.worked_s(), clock.waited_s())


def _store(writer: StoreWriter, sample: Sample, states: Captured | Failure, dtype: torch.dtype) -> None:
    if isinstance(states, Failure):
        writer.quarantine(sample.id, states.reason)
        return
    aux, last = states.aux.to(dtype), states.last.to(dtype)
    stored = StoredSample(
        sample.id, sample.conversation, sample.temperature, sample.input_ids, sample.loss_mask, aux, last
    )
    writer.add(stored)


def _windows(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    iterator = iter(samples)
    while window := list(islice(iterator, WINDOW)):
        yield window


def batches(samples: Sequence[Sample], batch_tokens: int) -> Iterator[list[Sample]]:
    """Sequences of like length, the longest first, at most `batch_tokens` with their padding (or one sequence)."""
    batch: list[Sample] = []
    for sample in sorted(samples, key=lambda s: (-len(s.input_ids), s.id)):
        if batch and (len(batch) + 1) * len(batch[0].input_ids) > batch_tokens:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


def teach_all(
    store: Path, head: Float[Tensor, "V H"], *, total_tokens: int, device: torch.device | str, chunk_tokens: int
) -> StageFigures:
    """The verifier's top-1 and logsumexp of every stored token."""
    tokens = reused = 0
    began = time.monotonic()
    with Progress("teacher", total_tokens, unit="tokens") as progress:
        for event in teacher_pass(store, head, device=device, chunk_tokens=chunk_tokens):
            if event.resumed:
                reused += event.tokens
                progress.skip(event.tokens)
            else:
                tokens += event.tokens
                progress.advance(event.tokens)
    return StageFigures(tokens, tokens, reused, time.monotonic() - began, 0.0)
