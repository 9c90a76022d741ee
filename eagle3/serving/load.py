"""Sends requests to a server, so many at once, and takes the time. A request that fails is counted, with its reason."""

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import httpx

from eagle3.serving.dialects import Dialect, Heard
from extract.launcher import ServerDied, ServerHung
from extract.local_http import client_options

DYING_S = 3.0
"""A connection breaks a moment before its process has ended."""


@dataclass(frozen=True)
class Answer:
    """One answer of the length that was asked for; seconds from the moment at which it was asked for."""

    heard: Heard
    first_tokens: int
    """Tokens of the first piece; of an answer in one piece, all."""
    first_s: float
    """Until the first piece."""
    last_s: float


@dataclass(frozen=True)
class Round:
    """What became of some requests."""

    answers: tuple[Answer, ...]
    failures: tuple[str, ...]
    """Why, for each that failed."""
    wall_s: float
    """From the first request to the last answer."""


class _Failed(Exception):
    """One request is lost; the server goes on."""


class Process(Protocol):
    """The server's; `extract.launcher.Launched` is one."""

    def death(self, within_s: float = ..., doing: str = ...) -> ServerDied | None:
        """The error to raise if it has ended, or does so within `within_s` seconds."""

    def told(self, what: str) -> str:
        """`what`, followed by the end of its log."""


class Load:
    """Asks one server; a context manager that holds its connections."""

    def __init__(self, url: str, dialect: Dialect, timeout_s: float, process: Process) -> None:
        self._url, self._dialect, self._timeout_s, self._process = url, dialect, timeout_s, process
        self._own, self._numbers = secrets.token_hex(4), itertools.count()

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner()
        self._client = httpx.AsyncClient(**client_options(self._url, self._timeout_s))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._runner:
            self._runner.run(self._client.aclose())

    def round(self, prompts: Sequence[Sequence[int]], *, at_once: int, new_tokens: int, stream: bool) -> Round:
        """Asks all prompts, `at_once` at a time; as soon as one is answered the next is asked.

        Raises:
            ServerDied: the server has ended.
            ServerHung: an answer, or the next piece of one, took longer than the time limit.
            ValueError: it refuses a request, with its words.
        """
        return self._runner.run(self._round(prompts, at_once, new_tokens, stream))

    async def _round(self, prompts: Sequence[Sequence[int]], at_once: int, new_tokens: int, stream: bool) -> Round:
        waiting, answers, failures = iter(prompts), list[Answer](), list[str]()

        async def client() -> None:
            for ids in waiting:
                try:
                    answers.append(await self._ask(ids, new_tokens, stream))
                except _Failed as failed:
                    failures.append(str(failed))

        began = time.perf_counter()
        tasks = [asyncio.ensure_future(client()) for _ in range(min(at_once, len(prompts)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return Round(tuple(answers), tuple(failures), time.perf_counter() - began)

    async def _ask(self, ids: Sequence[int], new_tokens: int, stream: bool) -> Answer:
        body = self._dialect.body(ids, new_tokens, own=f"{self._own}-{next(self._numbers)}", stream=stream)
        began = time.perf_counter()
        try:
            answer = await (self._streamed(body, began) if stream else self._whole(body, began))
        except httpx.TimeoutException as error:
            hung = f"the server has not answered a request of {len(ids)} tokens within {self._timeout_s:g} s"
            raise self._process.death() or ServerHung(self._process.told(hung)) from error
        except httpx.TransportError as error:
            if (died := await asyncio.to_thread(self._process.death, DYING_S)) is not None:
                raise died from error
            raise _Failed(f"the server broke off ({type(error).__name__} {error})".rstrip()) from error
        except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
            raise _Failed(f"the answer is none of {type(self._dialect).__name__} ({error!r})") from error
        if answer.heard.tokens != new_tokens:
            raise _Failed(f"an answer of {answer.heard.tokens} tokens instead of {new_tokens}")
        return answer

    async def _whole(self, body: dict[str, Any], began: float) -> Answer:
        response = await self._client.post(self._dialect.path, json=body)
        took_s = time.perf_counter() - began
        self._check(response.status_code, response.text)
        heard = self._dialect.heard(response.json(), Heard())
        return Answer(heard, heard.tokens, took_s, took_s)

    async def _streamed(self, body: dict[str, Any], began: float) -> Answer:
        heard, first_tokens, first_s, last_s = Heard(), 0, 0.0, 0.0
        async with self._client.stream("POST", self._dialect.path, json=body) as response:
            if response.status_code != 200:
                self._check(response.status_code, (await response.aread()).decode(errors="replace"))
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                said = json.loads(line.removeprefix("data: "))
                if "error" in said:
                    raise _Failed(f"the server broke an answer off: {said['error']}")
                before, heard = heard, self._dialect.heard(said, heard)
                if heard.tokens > before.tokens:
                    last_s = time.perf_counter() - began
                    first_tokens, first_s = (first_tokens, first_s) if first_tokens else (heard.tokens, last_s)
        return Answer(heard, first_tokens, first_s, last_s)

    def _check(self, status: int, text: str) -> None:
        if status >= 500:
            raise _Failed(f"the server answered with {status}: {text[:200]}")
        if status != 200:
            raise ValueError(f"the server refused {self._dialect.path} with {status}: {text[:500]}")
