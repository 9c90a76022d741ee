"""How a server on this machine is asked, by any number of threads or tasks at once."""

import logging
from typing import Any

import httpx

from extract.launcher import ServerError

HEALTH_TIMEOUT_S = 5.0


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


def is_ready(client: httpx.Client, name: str) -> bool:
    """Whether the server that calls its model `name` answers; ServerError if it is somebody else who does.

    SGLang and vLLM answer alike: /health with 503 until they are ready, /v1/models as OpenAI's does.
    """
    try:
        health = client.get("/health", timeout=HEALTH_TIMEOUT_S)
        models = client.get("/v1/models", timeout=HEALTH_TIMEOUT_S) if health.status_code == 200 else None
    except httpx.TransportError:
        return False
    if health.status_code == 503:
        return False
    if models is not None and models.status_code == 200 and name in models.text:
        return True
    said = health if models is None else models
    raise ServerError(
        f"a stranger answers on {client.base_url}, not our server {name}: {said.url.path} gave {said.status_code} "
        f"{said.text[:200]!r}; somebody took this port first, try again"
    )
