"""The phases of a benchmark: whatever ends one early says in which it was, in the error and so in a sweep's table."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from extract.launcher import ServerError

NAME = r"start|single|prefill|load at \d+"
TOLD = re.compile(rf"^\w+: (?P<phase>{NAME}): (?P<why>.*)$", re.DOTALL)
LOG = re.compile(r"; the last lines of .*?:\n", re.DOTALL)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """A server's error inside becomes one of the same kind that begins with `name`."""
    assert re.fullmatch(NAME, name), name
    try:
        yield
    except ServerError as error:
        raise type(error)(f"{name}: {error}") from error


def told(reason: str) -> tuple[str, str]:
    """Phase and reason, in one line, out of what a status.json says; no phase where the error came before all."""
    found = TOLD.match(reason)
    why = found["why"] if found else reason
    first, *log = LOG.split(why, maxsplit=1)
    last = log[0].strip().splitlines()[-1] if log and log[0].strip() else ""
    return found["phase"] if found else "", " ".join(f"{first}; its log ends: {last}".split()) if last else first
