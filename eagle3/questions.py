"""What evaluation asks: prompts as token ids, turn by turn. A later turn's prompt holds the verifier's own answers."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from extract.chat import Chat, ChatError
from extract.dialogue import Dialogue
from extract.prompts import Conversation
from extract.store import Store


@dataclass(frozen=True)
class Prompt:
    """One question: `turn` is 0 unless it continues a conversation."""

    id: str
    turn: int
    ids: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.id} turn {self.turn}" if self.turn else self.id


@runtime_checkable
class Questions(Protocol):
    """Where prompts come from. Every prompt of a round is answered before the next round is asked for."""

    total: int
    """Prompts in all rounds."""

    def next_round(self) -> list[Prompt]:
        """Prompts that can be asked now; empty when there are no more."""

    def answered(self, prompt: Prompt, response_ids: Sequence[int]) -> None:
        """The answer, for the prompts that build on it."""


class FixedQuestions:
    """Single prompts given as token ids."""

    def __init__(self, prompts: Iterable[Prompt]):
        self._prompts = list(prompts)
        self.total = len(self._prompts)

    def next_round(self) -> list[Prompt]:
        asked, self._prompts = self._prompts, []
        return asked

    def answered(self, prompt: Prompt, response_ids: Sequence[int]) -> None:
        """Nothing builds on it."""


class ChatQuestions:
    """Conversations whose every turn is answered anew; given answers are replaced, tool calls stay."""

    def __init__(self, conversations: Sequence[Conversation], chat: Chat, *, max_prompt: int):
        """`max_prompt`: tokens of the longest prompt that leaves room for an answer.

        Raises:
            ValueError: a conversation cannot be rendered or is too long, named.
        """
        self._chat, self._max_prompt = chat, max_prompt
        self._dialogues = {c.id: Dialogue(c, keep_given=False) for c in conversations}
        self.total = sum(len(c.exchanges()) for c in conversations)

    def next_round(self) -> list[Prompt]:
        prompts = []
        for dialogue in self._dialogues.values():
            dialogue.take_given(self._chat)
            if not dialogue.open:
                continue
            try:
                ids = dialogue.prompt_ids(self._chat)
            except ChatError as error:
                raise ValueError(f"evaluation prompt {dialogue.id}, turn {dialogue.turn}: {error}") from error
            if len(ids) > self._max_prompt:
                raise ValueError(
                    f"evaluation prompt {dialogue.id}, turn {dialogue.turn} has {len(ids)} tokens, more than "
                    f"{self._max_prompt}: shorten it, or lower evaluation.max_new_tokens"
                )
            prompts.append(Prompt(dialogue.id, dialogue.turn, tuple(ids)))
        return prompts

    def answered(self, prompt: Prompt, response_ids: Sequence[int]) -> None:
        self._dialogues[prompt.id].answered(self._chat, response_ids)


def refuse_trained(prompts: Collection[Prompt], store: Store) -> None:
    """A drafter must not be judged on prompts of its own store.

    Raises:
        ValueError: naming prompts whose ids are exactly what precedes a response of the store.
    """
    asked = {prompt.ids: prompt.name for prompt in prompts}
    lengths = {len(ids) for ids in asked}
    found = {}
    for ref in store.samples:
        ids, mask = (tensor.tolist() for tensor in store.ids_and_masks(ref))
        starts = [t for t in range(1, len(ids)) if mask[t] and not mask[t - 1]]
        for start in (t for t in starts if t in lengths):
            name = asked.get(tuple(ids[:start]))
            if name is not None:
                found[name] = ref.id
    if found:
        pairs = ", ".join(f"{name} (sample {sample})" for name, sample in list(found.items())[:5])
        raise ValueError(
            f"{len(found)} of {len(asked)} evaluation prompts are in the store {store.path}, which was trained on: "
            f"{pairs}; set evaluation.prompts to others"
        )
