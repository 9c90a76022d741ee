"""What a benchmark finds, and how it goes into the ledger and into summary.json."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle3.runlog import Declared, RunLog, SilentRunLog


@dataclass(frozen=True)
class Spread:
    """A figure over its repeats."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        return Spread(statistics.median(values), min(values), max(values))

    def flat(self, name: str) -> dict[str, float]:
        """Under `name`, `name_low` and `name_high`."""
        return {name: self.median, f"{name}_low": self.low, f"{name}_high": self.high}

    def __str__(self) -> str:
        low, high = short(self.low), short(self.high)
        return short(self.median) if low == high else f"{short(self.median)} ({low} to {high})"


def short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


@dataclass(frozen=True)
class Repeated:
    """One kind of figure: a row a repeat, names and values, of the answers that came; and how many did not."""

    rows: tuple[dict[str, float], ...]
    requests: int
    failed: int
    reason: str
    """Why the first failed; empty if none did."""

    def spread(self, name: str) -> Spread:
        return Spread.of([row[name] for row in self.rows])


@dataclass(frozen=True)
class Measured:
    """All figures of a server."""

    start_s: float
    """From the command until it was ready."""
    single: Repeated
    prefill: Repeated
    load: dict[int, Repeated]
    """By concurrency."""
    accept_len: float | None
    """1 + accepted drafts / verifications, over all answers that counted; None without a drafter."""

    @property
    def kinds(self) -> list[Repeated]:
        return [self.single, self.prefill, *self.load.values()]

    @property
    def reasons(self) -> list[str]:
        return sorted({kind.reason for kind in self.kinds if kind.reason})

    def result(self) -> dict[str, float]:
        """The figures by which servers are compared; `load_tok_s` is that of the highest concurrency."""
        told = {
            "start_s": self.start_s,
            "decode_tok_s": self.single.spread("decode_tok_s").median,
            "ttft_ms": self.single.spread("ttft_ms").median,
            "prefill_tok_s": self.prefill.spread("prefill_tok_s").median,
            "load_tok_s": self.load[max(self.load)].spread("tok_s").median,
            "requests": sum(kind.requests for kind in self.kinds),
            "failed": sum(kind.failed for kind in self.kinds),
        }
        return told if self.accept_len is None else told | {"accept_len": self.accept_len}

    def summary(self) -> dict[str, Any]:
        """Plain values for summary.json."""
        at = [
            {"concurrency": clients, **kind.spread("tok_s").flat("tok_s"),
             "latency_s": kind.spread("latency_s").median, "requests": kind.requests, "failed": kind.failed,
             "repeats": [row["tok_s"] for row in kind.rows]}
            for clients, kind in self.load.items()
        ]  # fmt: skip
        spreads: dict[str, float] = {}
        for kind, name in ((self.single, "decode_tok_s"), (self.single, "ttft_ms"), (self.prefill, "prefill_tok_s")):
            spreads |= kind.spread(name).flat(name)
        return self.result() | spreads | {"concurrency": max(self.load), "load": at, "reasons": self.reasons}


COUNTS = frozenset({"requests", "failed"})


def declared(with_drafter: bool) -> dict[str, Declared]:
    """Every metric of a benchmark: `single` and `prefill` by repeat, `load` by concurrency, and `result` once."""
    load = frozenset({"tok_s", "tok_s_low", "tok_s_high", "latency_s"}) | COUNTS
    result = frozenset({"start_s", "decode_tok_s", "ttft_ms", "prefill_tok_s", "load_tok_s"}) | COUNTS
    return {
        "single": Declared(names=frozenset({"decode_tok_s", "ttft_ms"})),
        "prefill": Declared(names=frozenset({"prefill_tok_s"})),
        "load": Declared(names=load, integer=COUNTS),
        "result": Declared(names=result | ({"accept_len"} if with_drafter else set()), integer=COUNTS),
    }


class Rows:
    """Rows into the ledger as soon as they are known, so that a server that dies late leaves what it did."""

    def __init__(self, runlog: RunLog | SilentRunLog, *, repeats: int, concurrencies: int) -> None:
        self._runlog = runlog
        for split, count in (("single", repeats), ("prefill", repeats), ("load", concurrencies), ("result", 1)):
            runlog.expect(split, count)

    def repeats(self, split: str, kind: Repeated) -> None:
        """Of `single` or `prefill`: a row a repeat."""
        for number, row in enumerate(kind.rows, start=1):
            self._runlog.emit(split, number, row)

    def load(self, clients: int, kind: Repeated) -> None:
        """One concurrency: median and spread."""
        latency_s, counts = kind.spread("latency_s").median, {"requests": kind.requests, "failed": kind.failed}
        self._runlog.emit("load", clients, kind.spread("tok_s").flat("tok_s") | {"latency_s": latency_s} | counts)

    def result(self, measured: Measured) -> None:
        """The figures by which servers are compared."""
        self._runlog.emit("result", 1, measured.result())
