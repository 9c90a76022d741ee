"""What a benchmark asks: real first turns, and long prompts that are made of them."""

import itertools
from collections.abc import Iterator, Sequence

from eagle3.config import Config, Serving
from extract.chat import Chat
from extract.dialogue import Dialogue
from extract.prompts import read_conversations
from extract.verifier import VerifierSpec, load_tokenizer

Ids = tuple[int, ...]


class Prompts:
    """Endless prompts, in the order of their file and then from its beginning again."""

    def __init__(self, turns: Sequence[Ids]) -> None:
        self.turns = tuple(turns)
        self._next = itertools.cycle(self.turns)
        self._stream = itertools.chain.from_iterable(itertools.cycle(self.turns))

    def take(self, count: int) -> list[Ids]:
        """The next `count` prompts."""
        return list(itertools.islice(self._next, count))

    def long(self, count: int, tokens: int) -> list[Ids]:
        """`count` prompts of exactly `tokens` tokens, each going on where the last one ended."""
        return [tuple(itertools.islice(self._stream, tokens)) for _ in range(count)]


def read_prompts(config: Config, spec: VerifierSpec) -> Prompts:
    """The first turn of every conversation, as the verifier reads it.

    Raises:
        ValueError: the file cannot be read, or a prompt leaves no room for its answer.
    """
    wanted = config.serving
    conversations, _ = read_conversations(
        wanted.prompts, split=None, limit=wanted.limit, system_prompt=config.extraction.system_prompt
    )
    chat = Chat(load_tokenizer(spec), spec.end_of_turn_ids, spec.vocab_size)
    turns = [tuple(Dialogue(conversation, keep_given=False).prompt_ids(chat)) for conversation in conversations]
    for key, longest in _lengths(wanted, max(map(len, turns))):
        if longest > spec.max_position_embeddings:
            raise ValueError(
                f"{key}: prompt and answer together are {longest} tokens, more than the "
                f"{spec.max_position_embeddings} positions of {spec.name}; lower it"
            )
    return Prompts(turns)


def _lengths(wanted: Serving, longest: int) -> Iterator[tuple[str, int]]:
    yield f"serving.new_tokens={wanted.new_tokens}", longest + wanted.new_tokens
    yield f"serving.prefill_tokens={wanted.prefill_tokens}", wanted.prefill_tokens + 1
