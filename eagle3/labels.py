"""Short names for runs side by side: what differs between them, as briefly as it can be said without two alike."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

LONGEST = 32
"""Characters of a value; a longer one loses its middle."""


def differing(told: Sequence[Mapping[str, str]]) -> list[str]:
    """Keys whose value is not the same in all, in order of appearance."""
    keys = dict.fromkeys(key for one in told for key in one)
    return [key for key in keys if len({one.get(key) for one in told}) > 1]


def labels(told: Sequence[Mapping[str, str]], keys: Sequence[str]) -> list[str]:
    """One text a run: `lr=3e-4 store=a`, each key by its last part and each path by its last, where that is enough."""
    ends = Counter(key.rpartition(".")[2] for key in keys)
    names = {key: key.rpartition(".")[2] if ends[key.rpartition(".")[2]] == 1 else key for key in keys}
    short = {key: _short_values({one[key] for one in told if key in one}) for key in keys}
    return [" ".join(f"{names[key]}={short[key][one[key]]}" for key in keys if key in one) for one in told]


def _short_values(values: Iterable[str]) -> dict[str, str]:
    """Each value's shortest form in which no two are equal."""
    whole = sorted(values)
    for shorten in (lambda value: _cut(_last_of_path(value)), _cut):
        short = [shorten(value) for value in whole]
        if len(set(short)) == len(whole):
            return dict(zip(whole, short, strict=True))
    return dict(zip(whole, whole, strict=True))


def _last_of_path(value: str) -> str:
    """Of a path alone: a list, or an expression, keeps its slashes."""
    return value if any(c in value for c in "[{( ") else value.rstrip("/").rpartition("/")[2] or value


def _cut(value: str) -> str:
    half = LONGEST // 2
    return value if len(value) <= LONGEST else f"{value[: half - 1]}…{value[-half:]}"
