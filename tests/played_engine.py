"""An engine that is played in process: it decodes with a drafter of its own, perhaps a broken one, and counts."""

from contextlib import contextmanager

from eagle3.decode import Verifier, decode
from eagle3.gate import counts_of, total
from eagle3.truth import plain_greedy
from extract.engines.base import Completion, Counters


class PlayedEngine:
    """Answers as a server would. It drafts past the end of a response and counts that, as engines do."""

    version = "1.0"

    def __init__(self, model, drafter, drafts):
        self.model, self.drafter, self.drafts = model, drafter, drafts
        self.seen = []

    def complete(self, ids, *, max_new_tokens, stop_ids):
        if self.drafter is None:
            [text] = plain_greedy(self.model, [ids], max_new_tokens=max_new_tokens, end_of_turn_ids=stop_ids)
            return Completion(tuple(text), self._reason(text, stop_ids), (), (), 1.0)
        with Verifier(self.model, self.drafter.shape.capture_layers) as verifier:
            limits = {"max_new_tokens": max_new_tokens + self.drafts, "end_of_turn_ids": stop_ids}
            decoded = decode(verifier, self.drafter, ids, drafts=self.drafts, **limits)
        text, accepted = decoded.response_ids[:max_new_tokens], []
        done = 1
        for one in decoded.rounds:
            if done >= len(text):
                break
            accepted.append(one.accepted)
            done += one.accepted + 1
        self.seen += accepted
        return Completion(text, self._reason(text, stop_ids), tuple(accepted), (self.drafts,) * len(accepted), 0.5)

    def counters(self):
        counts = total([counts_of(self.seen, self.drafts)])
        drafted = self.drafts * counts.verifications
        return Counters(counts.verifications, drafted, sum(counts.accepted), counts.accepted)

    @staticmethod
    def _reason(text, stop_ids):
        return "stop" if text[-1] in stop_ids else "length"


def played(model, drafter, drafts):
    """What `eagle3.served.answer` takes as `start`."""

    @contextmanager
    def start(with_drafter):
        yield PlayedEngine(model, drafter if with_drafter else None, drafts)

    return start
