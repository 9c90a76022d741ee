"""Which validation is the best: one rule for checkpoints, tables and charts."""

import math
from collections.abc import Iterable

from eagle3.runlog.ledger import Row

Quality = tuple[float, float, int]


def quality(accept_len: float, loss: float, step: int) -> Quality:
    """The greatest is the best: the longest acceptance, of equals the lowest loss, of these the earliest step."""
    return accept_len, -loss if math.isfinite(loss) else -math.inf, -step


def best_validation(rows: Iterable[Row]) -> Row | None:
    """The best row of the split `val`; None where none has a finite acceptance length."""
    known = [row for row in rows if row.split == "val" and math.isfinite(row.values.get("accept_len", math.nan))]
    return max(known, key=quality_of, default=None)


def quality_of(row: Row) -> Quality:
    return quality(row.values["accept_len"], row.values.get("loss", math.nan), row.step)
