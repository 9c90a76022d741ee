"""Second step of extraction: the verifier answers the prompts, in batches, into a journal."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from extract.ahead import in_order
from extract.chat import Chat, ChatError
from extract.dialogue import Dialogue, count_turns
from extract.engines.base import Engine, Generated, ahead_of
from extract.journal import Journal, Record
from extract.prompts import Conversation, Skipped
from extract.retry import Failure, Patience

__all__ = ["Answered", "Sampling", "count_turns", "plan_batches", "respond"]

WINDOW = 2048
"""Conversations sorted by length and held in memory at a time: memory does not grow with their number."""


@dataclass(frozen=True)
class Sampling:
    """How answers are generated; temperature 0 is greedy, and then top_p and seed mean nothing."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True)
class Answered:
    """Progress: turns and tokens that this batch added, or that were found in the journal (reused)."""

    turns: int
    prompt_tokens: int
    response_tokens: int
    reused: bool
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True)
class _Request:
    dialogue: Dialogue
    turn: int
    """The dialogue's turn when this was asked; the dialogue itself moves on."""
    prompt_ids: list[int]

    @property
    def key(self) -> tuple[str, int]:
        return self.dialogue.id, self.turn


def respond(
    engine: Engine,
    chat: Chat,
    conversations: Sequence[Conversation],
    journal: Journal,
    *,
    sampling: Sampling,
    verifier_sha256: str,
    max_len: int,
    batch_size: int = 32,
    keep_given: bool = False,
    patience: Patience | None = None,
) -> Iterator[Answered]:
    """Generates every missing turn of every conversation; each batch is on disk before its event is yielded.

    Turn i + 1 is generated after turn i, with the verifier's own answer i in the history. What the
    journal holds is never generated again. A conversation that cannot be answered (template, `max_len`,
    engine) is skipped with its reason. Batches depend on the conversations alone, their seeds on
    `sampling.seed` and the batch: a resumed run samples the same text as an unbroken one, except in a
    batch of which a kill left a part.
    Raises ValueError if the journal belongs to other prompts, sampling or verifier; EngineError if the engine
    is broken.
    """
    session = _Session(engine, chat, journal, sampling, verifier_sha256, max_len, patience or Patience())
    for start in range(0, len(conversations), WINDOW):
        dialogues = [Dialogue(c, keep_given=keep_given) for c in conversations[start : start + WINDOW]]
        while dialogues:
            yield session.journal_given(dialogues)
            requests, skipped = session.prompts(dialogues)
            yield Answered(0, 0, 0, reused=False, skipped=tuple(skipped))
            batches = plan_batches(requests, batch_size)
            found = [request for batch in batches for request in batch if request.key in journal]
            if found:
                yield session.reuse(found)
            for asked, results in in_order(session.ask, map(session.missing, batches), ahead_of(engine)):
                if asked.requests:
                    yield session.take(asked.requests, results)
            dialogues = [dialogue for dialogue in dialogues if dialogue.open]


def plan_batches(requests: Sequence[_Request], batch_size: int) -> list[list[_Request]]:
    """Batches of prompts of like length, the longest first: what does not fit into memory shows at once."""
    ordered = sorted(requests, key=lambda request: (-len(request.prompt_ids), request.key))
    return [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]


@dataclass(frozen=True)
class _Asked:
    """What is asked of the engine at once."""

    requests: list[_Request]
    max_new_tokens: int
    seed: int


@dataclass(frozen=True)
class _Session:
    """What stays the same over all batches of one call of `respond`."""

    engine: Engine
    chat: Chat
    journal: Journal
    sampling: Sampling
    verifier_sha256: str
    max_len: int
    patience: Patience

    def journal_given(self, dialogues: Sequence[Dialogue]) -> Answered:
        """Moves every dialogue to its next turn to be generated; given answers that stay are journalled."""
        records, skipped = [], []
        for dialogue in dialogues:
            turns, unlocated = dialogue.take_given(self.chat)
            skipped += unlocated
            for number, turn in turns:
                made = self._record(
                    (dialogue.id, number),
                    turn.prompt_ids,
                    turn.response_ids,
                    turn.finish_reason,
                    turn.temperature,
                )
                if (dialogue.id, number) in self.journal:
                    self._check_same(made, self.journal.get(dialogue.id, number))
                else:
                    records.append(made)
        self.journal.append(records)
        return _event(records, reused=False, skipped=skipped)

    def prompts(self, dialogues: Sequence[Dialogue]) -> tuple[list[_Request], list[Skipped]]:
        """The next prompt of every open dialogue; those without one are given up."""
        requests, skipped = [], []
        for dialogue in dialogues:
            if not dialogue.open:
                continue
            try:
                ids = dialogue.prompt_ids(self.chat)
            except ChatError as error:
                reason = str(error)
            else:
                if len(ids) < self.max_len:
                    requests.append(_Request(dialogue, dialogue.turn, ids))
                    continue
                reason = f"the prompt has {len(ids)} tokens and leaves no room for an answer in {self.max_len}"
            skipped.append(Skipped(dialogue.id, f"turn {dialogue.turn}: {reason}"))
            dialogue.give_up()
        return requests, skipped

    def missing(self, batch: Sequence[_Request]) -> _Asked:
        """What the journal lacks of a batch; room and seed are those of the whole batch, whatever is there already."""
        # Longer answers would only be cut from the samples again.
        room = self.max_len - min(len(request.prompt_ids) for request in batch)
        requests = [request for request in batch if request.key not in self.journal]
        return _Asked(requests, min(self.sampling.max_new_tokens, room), _batch_seed(self.sampling.seed, batch))

    def ask(self, asked: _Asked) -> list[Generated | Failure]:
        """The engine's answers; nothing else is touched, so that several batches may be under way."""
        if not asked.requests:
            return []

        def generate(requests: Sequence[_Request]) -> list[Generated]:
            return self.engine.generate(
                [request.prompt_ids for request in requests],
                max_new_tokens=asked.max_new_tokens,
                temperature=self.sampling.temperature,
                top_p=self.sampling.top_p,
                seed=asked.seed,
                stop_ids=self.chat.end_of_turn_ids,
            )

        return self.patience.run(generate, asked.requests)

    def take(self, requests: Sequence[_Request], results: Sequence[Generated | Failure]) -> Answered:
        """Answers go into the journal, and their dialogues move on."""
        records, skipped = [], []
        for request, result in zip(requests, results, strict=True):
            if isinstance(result, Failure):
                skipped.append(Skipped(request.dialogue.id, f"turn {request.turn}: {result.reason}"))
                request.dialogue.give_up()
                continue
            records.append(self._record(request.key, request.prompt_ids, result.ids, result.finish_reason))
            request.dialogue.answered(self.chat, result.ids)
        self.journal.append(records)
        return _event(records, reused=False, skipped=skipped)

    def reuse(self, found: Sequence[_Request]) -> Answered:
        """Answers out of the journal; ValueError if they belong to another prompt, sampling or verifier."""
        records = [self.journal.get(*request.key) for request in found]
        for request, record in zip(found, records, strict=True):
            wanted = self._record(request.key, request.prompt_ids, record["response_ids"], record["finish_reason"])
            self._check_same(wanted, record)
            request.dialogue.answered(self.chat, record["response_ids"])
        return _event(records, reused=True)

    def _record(
        self,
        key: tuple[str, int],
        prompt_ids: list[int],
        response_ids: list[int],
        finish_reason: str,
        given_temperature: float | None = None,
    ) -> Record:
        given = given_temperature is not None
        drawn = not given and self.sampling.temperature > 0
        return {
            "id": key[0],
            "turn": key[1],
            "prompt_ids": prompt_ids,
            "response_ids": response_ids,
            "finish_reason": finish_reason,
            "temperature": given_temperature if given else self.sampling.temperature,
            "top_p": self.sampling.top_p if drawn else None,
            "seed": self.sampling.seed if drawn else None,
            "verifier_sha256": self.verifier_sha256,
            "source": "given" if given else "generated",
        }

    def _check_same(self, wanted: Record, record: Record) -> None:
        different = [key for key in wanted if wanted[key] != record[key]]
        if different:
            raise ValueError(
                f"{self.journal.path}: turn {record['turn']} of {record['id']} was journalled with another "
                f"{', '.join(different)}; resume with the settings and prompts of then, or name another store"
            )


def _batch_seed(seed: int, batch: Sequence[_Request]) -> int:
    """A seed of its own for each batch, whichever batches were done before."""
    name = "\n".join(f"{dialogue_id} {turn}" for dialogue_id, turn in [request.key for request in batch])
    return int.from_bytes(hashlib.sha256(f"{seed}\n{name}".encode()).digest()[:7])


def _event(records: Sequence[Record], *, reused: bool, skipped: Sequence[Skipped] = ()) -> Answered:
    return Answered(
        turns=len(records),
        prompt_tokens=sum(len(record["prompt_ids"]) for record in records),
        response_tokens=sum(len(record["response_ids"]) for record in records),
        reused=reused,
        skipped=tuple(skipped),
    )
