"""One conversation while it is being answered: what has been said, and where the verifier speaks next."""

from collections.abc import Sequence

from extract.chat import Chat, ChatError, Turn
from extract.messages import Message
from extract.prompts import Conversation, Exchange, Skipped


class Dialogue:
    """Walks through a conversation's exchanges; the history holds the verifier's answers, not those replaced.

    `turn` numbers the exchanges from 0, given answers included, so that it means the same on every resume.
    """

    def __init__(self, conversation: Conversation, *, keep_given: bool):
        self.conversation = conversation
        self.id = conversation.id
        self.turn = 0
        self._exchanges = conversation.exchanges()
        self._keep_given = keep_given
        self._history: list[Message] = []

    @property
    def open(self) -> bool:
        """Whether an exchange is left."""
        return self.turn < len(self._exchanges)

    def prompt_ids(self, chat: Chat) -> list[int]:
        """What the verifier reads before it answers the current turn; ChatError if it cannot be rendered."""
        asked = self._exchanges[self.turn].asked
        return chat.prompt_ids([*self._history, *asked], self.conversation.tools)

    def answered(self, chat: Chat, response_ids: Sequence[int]) -> None:
        """The verifier's answer joins the history, decoded as a server would send it."""
        self._move_on(chat.answer_message(response_ids))

    def take_given(self, chat: Chat) -> tuple[list[tuple[int, Turn]], list[Skipped]]:
        """Walks over the given answers that stay, up to the next turn to be generated.

        Returns the turns that are kept as training data, with their numbers, and those whose tokens cannot be
        told. A given tool call is never replaced (its results belong to it); it is training data only with
        keep_given.
        """
        turns, skipped = [], []
        while self.open and (given := self._exchanges[self.turn].given) is not None and not self._replaced():
            if self._keep_given:
                before = [*self._history, *self._exchanges[self.turn].asked]
                try:
                    turns.append((self.turn, chat.given_turn(before, given, self.conversation.tools)))
                except ChatError as error:
                    skipped.append(Skipped(self.id, f"given answer {self.turn}: {error}"))
            self._move_on(given)
        return turns, skipped

    def give_up(self) -> None:
        """Later turns cannot be answered without this one."""
        self.turn = len(self._exchanges)

    def _replaced(self) -> bool:
        return generated_here(self._exchanges[self.turn], keep_given=self._keep_given)

    def _move_on(self, answer: Message) -> None:
        self._history += [*self._exchanges[self.turn].asked, answer]
        self.turn += 1


def generated_here(exchange: Exchange, *, keep_given: bool) -> bool:
    """Whether the verifier answers this exchange itself; a greeting that nobody asked for stays."""
    if exchange.given is None:
        return True
    asked = any(message["role"] != "system" for message in exchange.asked)
    return not keep_given and exchange.replaceable and asked


def count_turns(conversations: Sequence[Conversation], *, keep_given: bool) -> int:
    """How many turns the verifier will have to generate."""
    return sum(
        generated_here(exchange, keep_given=keep_given)
        for conversation in conversations
        for exchange in conversation.exchanges()
    )
