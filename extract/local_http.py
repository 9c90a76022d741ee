"""How a server on this machine is asked, by any number of threads or tasks at once."""

import logging
from typing import Any

import httpx


def client_options(url: str, timeout_s: float) -> dict[str, Any]:
    """For httpx.Client and httpx.AsyncClient.

    Every request has a connection of its own. One that is kept for the next may be closed at that very moment, by the
    server as idle, or by httpx' own pool, which counts a connection as idle that it has just given to another thread:
    of two thousand requests to a GPU one or two broke off with "Bad file descriptor".
    """
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would tell of every request
    return {
        "base_url": url,
        "timeout": timeout_s,
        "trust_env": False,  # a proxy has no part in this
        "limits": httpx.Limits(max_connections=None),
        "headers": {"Connection": "close"},
    }
