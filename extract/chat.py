"""Chat messages to token ids, prompt and answer apart, for any chat template, by rendering increments.

The template stays the stock one. Where an answer starts and ends is found by rendering the messages before it
with the generation prompt, and then with the answer: what the second adds to the first was written by the
assistant. No pattern is matched, so markers quoted inside a message mislead nothing.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from extract.messages import Message
from extract.samples import Sample, Turn, build_samples, mask_preview, require_supervision

__all__ = ["Chat", "ChatError", "Sample", "Turn", "build_samples", "mask_preview", "require_supervision"]

log = logging.getLogger(__name__)

GIVEN_TEMPERATURE = 1.0
"""Temperature of an answer that came with the prompts: unknown, but surely not the verifier's greedy text."""

Tools = list[Any] | None


class ChatError(ValueError):
    """This conversation cannot be rendered, or its answer cannot be located; the text is the reason."""


@dataclass(frozen=True)
class Rendered:
    """A prompt, and the same with an answer: `ids` begin with `prompt_ids`, `text` with `prompt_text`."""

    prompt_ids: list[int]
    prompt_text: str
    ids: list[int]
    text: str


class Chat:
    """A tokenizer with its chat template, and the verifier's end-of-turn ids and vocabulary size."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_of_turn_ids: Collection[int], vocab_size: int):
        if tokenizer.chat_template is None:
            raise ValueError(
                "the verifier's tokenizer has no chat template: set verifier.chat_template to a .jinja file"
            )
        if not end_of_turn_ids or not all(0 <= i < vocab_size for i in end_of_turn_ids):
            raise ValueError(
                f"end-of-turn ids {sorted(end_of_turn_ids)} must be one or more ids below the verifier's "
                f"vocabulary size {vocab_size}: check eos_token_id in its generation_config.json"
            )
        if len(tokenizer) > vocab_size:
            log.warning("the tokenizer has %d ids, the verifier only %d", len(tokenizer), vocab_size)
        self.tokenizer = tokenizer
        self.end_of_turn_ids = frozenset(end_of_turn_ids)
        self.vocab_size = vocab_size

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """What a server feeds the verifier for these messages: the stock template with its generation prompt.

        Raises ChatError if the template refuses the messages or an id lies outside the verifier's vocabulary.
        """
        with_prompt = self._apply(messages, tools, tokenize=True, add_generation_prompt=True)
        return self._checked(token_ids(with_prompt))

    def given_turn(self, before: Sequence[Message], answer: Message, tools: Tools = None) -> Turn:
        """The turn in which the assistant would itself have written `answer` after the messages `before`.

        The response ends with its end-of-turn token; template text behind it is left off. Text that the
        template puts before every answer (an empty think block) goes to `prompt_ids`, outside the mask,
        unless `answer` itself begins with it. Raises ChatError if the answer cannot be located.
        """
        rendered = self._render(before, answer, tools)
        response = self._response(rendered, before, answer, tools)
        skip = self._count_inserted(rendered, before, answer, tools)
        return Turn(rendered.prompt_ids + response[:skip], response[skip:], "stop", GIVEN_TEMPERATURE)

    def answer_message(self, response_ids: Sequence[int]) -> Message:
        """A generated response as the message from which the next turn's prompt is rendered."""
        ids = list(response_ids)
        if ids and ids[-1] in self.end_of_turn_ids:
            ids.pop()
        return {"role": "assistant", "content": self._decode(ids)}

    def _render(self, before: Sequence[Message], answer: Message, tools: Tools) -> Rendered:
        prompt_ids = self.prompt_ids(before, tools)
        prompt_text = self._text(before, tools, add_generation_prompt=True)
        text = self._text([*before, answer], tools)
        if not text.startswith(prompt_text):
            raise ChatError(
                "the template's rendering of this answer does not continue its own generation prompt "
                f"(...{prompt_text[-40:]!r}): the verifier could not have written it"
            )
        return Rendered(prompt_ids, prompt_text, self._continue(prompt_ids, prompt_text, text), text)

    def _continue(self, ids: list[int], text: str, longer: str) -> list[int]:
        """The ids of `longer`, which begins with `text`, such that they begin with `ids`, the ids of `text`.

        Where a token would span the seam, the added text is encoded alone: an assistant starts from `ids`.
        """
        whole = self._encode(longer)
        if whole[: len(ids)] == ids:
            return self._checked(whole)
        joined = ids + self._encode(longer[len(text) :])
        if self._decode(joined) != self._decode(whole):
            raise ChatError(f"the tokenizer cannot continue after {text[-20:]!r} without changing the text")
        return self._checked(joined)

    def _response(self, rendered: Rendered, before: Sequence[Message], answer: Message, tools: Tools) -> list[int]:
        """The ids after the prompt, up to the first end-of-turn id, where generation would have stopped."""
        response = rendered.ids[len(rendered.prompt_ids) :]
        for index, token in enumerate(response):
            if token in self.end_of_turn_ids:
                return response[: index + 1]
        # Some templates end an answer only by the next header (GLM: <|user|>), which one more message shows.
        speaker = "tool" if "tool_calls" in answer else "user"
        longer = self._text([*before, answer, {"role": speaker, "content": "A"}], tools)
        if longer.startswith(rendered.text):
            after = self._continue(rendered.ids, rendered.text, longer)[len(rendered.ids) :]
            if after and after[0] in self.end_of_turn_ids:
                return [*response, after[0]]
        ends = sorted(self.end_of_turn_ids)
        raise ChatError(f"the template ends the answer with none of the end-of-turn ids {ends}")

    def _count_inserted(self, rendered: Rendered, before: Sequence[Message], answer: Message, tools: Tools) -> int:
        """How many ids after the prompt are the template's own: those that two other answers get as well."""
        probes = [self._text([*before, {"role": "assistant", "content": c}], tools) for c in ("A", "B")]
        shared = count_shared(probes)
        inserted = probes[0][len(rendered.prompt_text) : shared].strip()
        # An answer with its own thinking differs inside the template's text: the assistant wrote all of it.
        if not inserted or count_shared([*probes, rendered.text]) < shared:
            return 0
        if str(answer.get("content") or "").startswith(inserted):
            return 0
        num_shared_ids = count_shared([*(self._encode(p) for p in probes), rendered.ids])
        return max(0, num_shared_ids - len(rendered.prompt_ids))

    def _text(self, messages: Sequence[Message], tools: Tools, *, add_generation_prompt: bool = False) -> str:
        return self._apply(messages, tools, tokenize=False, add_generation_prompt=add_generation_prompt)

    def _apply(self, messages: Sequence[Message], tools: Tools, *, tokenize: bool, add_generation_prompt: bool) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=tokenize, add_generation_prompt=add_generation_prompt
            )
        # What a template can raise is open: its own refusals, or Python's errors on values it did not expect.
        except (TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ChatError(f"the chat template cannot render the messages ({roles}): {error}") from error

    def _encode(self, text: str) -> list[int]:
        return token_ids(self.tokenizer(text, add_special_tokens=False))

    def _decode(self, ids: list[int]) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cast(str, text)

    def _checked(self, ids: list[int]) -> list[int]:
        highest = max(ids, default=0)
        if highest >= self.vocab_size:
            raise ChatError(
                f"token id {highest} ({self.tokenizer.convert_ids_to_tokens(highest)!r}) is not below the "
                f"verifier's vocabulary size {self.vocab_size}: tokenizer or template belong to another model"
            )
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise ChatError(f"two begin-of-sequence tokens (id {bos}): the chat template writes it twice")
        return ids


def token_ids(encoded: Any) -> list[int]:
    """Plain ids of what a tokenizer returned: a mapping, list or tensor, with or without a batch axis."""
    ids = encoded["input_ids"] if isinstance(encoded, Mapping) else encoded
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if len(ids) == 1 and isinstance(ids[0], list):
        ids = ids[0]
    if not all(isinstance(i, int) for i in ids):
        raise ValueError(f"the tokenizer returned {type(encoded).__name__} with {ids[:3]!r}, expected token ids")
    return list(ids)


def count_shared(sequences: Sequence[Sequence[Any]]) -> int:
    """Length of the longest common beginning of all sequences."""
    count = 0
    for column in zip(*sequences, strict=False):
        if any(item != column[0] for item in column):
            break
        count += 1
    return count
