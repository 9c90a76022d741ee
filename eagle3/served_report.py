"""What an evaluation in a real engine found: three counts of acceptance length side by side, and the gate's verdict."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from eagle3.gate import NOT_INFORMATIVE, Check, Counts, gate, total
from eagle3.report import PromptResult, Report, make_report
from eagle3.served import Judged
from eagle3.suspects import Suspect
from extract.durable import replace_file

COUNTS = "counts.jsonl"
UNLIKELY = 0.01
"""Share of an engine's tokens that may lie further than a tie below the verifier's choice."""


class GateFailed(ValueError):
    """The engine does not decode with this drafter as training computes it, or the drafter cannot show it."""


@dataclass(frozen=True)
class ServedReport:
    engine_name: str
    """With its version."""
    judged: tuple[Judged, ...]
    pooled: Report
    """Pooled over the engine's own counts of drafts inside the responses."""
    raw: Counts
    """The engine's totals, with drafts that it accepted past the end of a response."""
    checks: tuple[Check, ...]
    suspects: tuple[Suspect, ...]
    """What was tried to explain a failed gate; empty if it passed."""

    @property
    def counts(self) -> dict[str, Counts]:
        """The three counts of one text."""
        decoded = (Counts(j.result.verifications, j.result.accepted) for j in self.judged)
        replayed = (Counts(j.result.replayed_verifications, j.result.replayed_accepted) for j in self.judged)
        return {
            self.engine_name: total(j.engine for j in self.judged),
            "in process": total(decoded),
            "replayed": total(replayed),
        }

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    @property
    def ties(self) -> int:
        return sum(j.parting is not None and j.parting.tie for j in self.judged)

    def summary(self) -> dict[str, object]:
        """Plain values for summary.json: those of an evaluation in process, and what the engine said itself."""
        engine, decoded, _ = self.counts.values()
        return self.pooled.summary() | {
            "engine": self.engine_name,
            "accept_len_raw": self.raw.length,
            "raw": asdict(self.raw),
            "accept_len_decoded": decoded.length,
            "text_ties": self.ties,
            "text_equal": sum(j.parting is None for j in self.judged),
            "gate": [asdict(check) for check in self.checks],
            "engine_counts": asdict(engine),
        }

    def rows(self) -> list[tuple[str, str]]:
        """The closing table."""
        pooled = self.pooled
        rows = [("acceptance length", f"{pooled.accept_len} (pooled, 95 % over prompts)")]
        for name, counts in self.counts.items():
            by_position = " ".join(f"{rate:.3f}" for rate in counts.rates)
            told = f"{counts.length:.3f}: {by_position} of {counts.verifications:,} verifications"
            rows.append((f"  counted: {name}", told))
        rows.append(("  its raw counters", f"{self.raw.length:.3f}, with drafts past a response's end"))
        rows.append(("text with drafter", self._text()))
        rows.append(("tokens/s, one at a time", _speeds(pooled)))
        rows.append(("gate", "passed: three counts agree" if not self.failed else "FAILED"))
        rows += [(f"  {check.name}", check.told) for check in self.failed]
        rows += [(f"  with {s.cause}", f"{s.counts.length:.3f}; look at {s.look_at}") for s in self.suspects]
        return rows

    def write_texts(self, directory: Path) -> Path:
        """texts.jsonl, as an evaluation in process writes it, and counts.jsonl with all counts of each prompt."""
        rows = (json.dumps(_counts_row(j)).encode() + b"\n" for j in self.judged)
        replace_file(directory / COUNTS, b"".join(rows))
        return self.pooled.write_texts(directory)

    def verdict(self) -> None:
        """Raises GateFailed with every failed check, and the fault that explains the engine's counts best."""
        if not self.failed:
            return
        told = "\n".join(f"  {check.name}: {check.told}" for check in self.failed)
        weak = [check.name for check in self.failed] == [NOT_INFORMATIVE]
        headline = "cannot be told to agree" if weak else "do not agree"
        raise GateFailed(f"{self.engine_name} and training {headline} on this drafter:\n{told}{self._explained()}")

    def _explained(self) -> str:
        if not self.suspects:
            return ""
        engine = next(iter(self.counts.values()))
        best = min(s.distance(engine) for s in self.suspects)
        replayed = list(self.counts.values())[-1]
        if best >= max(abs(a - b) for a, b in zip(engine.rates, replayed.rates, strict=True)):
            return (
                "\n  none of the faults that were tried comes nearer to the engine's counts than the drafter as it is"
            )
        nearest = [s for s in self.suspects if s.distance(engine) == best]
        causes = "; ".join(f"{s.cause} gives {s.counts.length:.3f}, look at {s.look_at}" for s in nearest)
        return f"\n  nearest to the engine's counts: {causes}"

    def _text(self) -> str:
        equal = sum(j.parting is None for j in self.judged)
        tokens = sum(len(j.result.response_ids) for j in self.judged)
        return (
            f"{equal} of {len(self.judged)} prompts as without, {self.ties} part at a bf16 tie; "
            f"{sum(j.unlikely for j in self.judged)} of {tokens} tokens are not the verifier's choice"
        )


def _speeds(pooled: Report) -> str:
    alone, with_drafter = (
        "not timed" if rate is None else f"{rate:.1f}" for rate in (pooled.plain_tokens_s, pooled.speculative_tokens_s)
    )
    told = f"alone {alone}, with drafter {with_drafter}"
    return told if pooled.speed_up is None else f"{told}: x{pooled.speed_up:.2f}"


def make_served_report(
    engine_name: str, judged: Sequence[Judged], raw: Counts, *, drafts: int, resamples: int, seed: int,
    find_suspects: Callable[[], Sequence[Suspect]],
) -> ServedReport:  # fmt: skip
    """Pools and judges; `find_suspects` is called if the counts disagree."""
    pooled = make_report([_of_engine(j) for j in judged], drafts, resamples, seed)
    served = ServedReport(engine_name, tuple(judged), pooled, raw, (), ())
    engine, decoded, replayed = served.counts.values()
    counted = gate(engine, decoded, replayed)
    # A drafter that is too weak to tell is no riddle; only a disagreement is worth a search.
    disagree = any(not check.passed for check in counted[1:])
    return replace(
        served,
        checks=(*counted, *_text_checks(judged)),
        suspects=tuple(find_suspects()) if disagree else (),
    )


def _counts_row(judged: Judged) -> dict[str, object]:
    result = judged.result
    return {
        "id": result.id,
        "turn": result.turn,
        "tokens": len(result.response_ids),
        "accepted": judged.accepted,
        "engine": asdict(judged.engine),
        "in_process": {"verifications": result.verifications, "accepted": result.accepted},
        "replayed": {"verifications": result.replayed_verifications, "accepted": result.replayed_accepted},
        "parting": None if judged.parting is None else asdict(judged.parting),
        "unlikely": judged.unlikely,
        "plain_s": result.plain_s,
        "speculative_s": result.speculative_s,
    }


def _of_engine(judged: Judged) -> PromptResult:
    return replace(judged.result, verifications=judged.engine.verifications, accepted=judged.engine.accepted)


def _text_checks(judged: Sequence[Judged]) -> list[Check]:
    partings = [(j.result.id, j.parting) for j in judged if j.parting is not None and not j.parting.tie]
    told = "; ".join(f"{name}: token {p.at}, {p.tokens[0]} against {p.tokens[1]}, {p.ulps:.1f} bf16 steps apart"
                     for name, p in partings[:3])  # fmt: skip
    tokens, unlikely = sum(len(j.result.response_ids) for j in judged), sum(j.unlikely for j in judged)
    foreign = f"{unlikely} of {tokens} tokens lie further than a tie below the verifier's choice: another verifier?"
    return [
        Check("text: as without the drafter", not partings, told or "equal, or parts at ties"),
        Check("text: the verifier's own", unlikely <= UNLIKELY * tokens, foreign),
    ]
