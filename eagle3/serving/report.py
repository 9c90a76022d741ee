"""What serve.py shows: a server's command line, the figures of a benchmark, and what to type next."""

import json
import shlex
from collections.abc import Sequence
from typing import Any

from rich import get_console
from rich.text import Text

from eagle3.serving.figures import Spread, short
from eagle3.serving.lines import Line
from eagle3.serving.started import url_of
from extract.progress import closing_table


def show_line(line: Line) -> None:
    """In one piece, to be pasted."""
    get_console().print(Text(line.text), soft_wrap=True)


def show_summary(summary: dict[str, Any], *, reused: bool, next_command: str) -> None:
    """The closing table of a benchmark; failed requests stand in the line of what they spoiled, and once more below."""
    rows = [
        (
            "server",
            f"{summary['engine']}, {summary['verifier']}, {_drafter(summary)}; ready in {summary['start_s']:.0f} s",
        ),
        ("single stream", f"{_spread(summary, 'decode_tok_s')} tokens/s"),
        ("first token", f"{_spread(summary, 'ttft_ms')} ms"),
        ("prefill", f"{_spread(summary, 'prefill_tok_s')} tokens/s"),
    ]
    for at in summary["load"]:
        failed = f", {at['failed']} of {at['requests']} FAILED" if at["failed"] else ""
        told = f"{_spread(at, 'tok_s')} tokens/s, an answer in {at['latency_s']:.2f} s{failed}"
        rows.append((f"{at['concurrency']} at once", told))
    if "accept_len" in summary:
        rows.append(("acceptance length", f"{summary['accept_len']:.3f}, the engine's own count"))
    rows.append(("requests", f"{summary['requests']}, {summary['failed']} failed"))
    if summary["tracked"]:
        get_console().print(Text(f"W&B: {summary['tracked']}"), soft_wrap=True)  # in one piece, to be pasted
    rows += [("failed", reason) for reason in summary["reasons"]]
    title = "The server is measured" + (" (reused)" if reused else "")
    closing_table(f"{title}: median (least to greatest of the repeats)", rows, next_command)


def show_foreground(line: Line, log: str) -> None:
    """Where the server is, and how to ask it."""
    body = {"model": line.name, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}
    data = shlex.quote(json.dumps(body))
    ask = f"curl {url_of(line)}/v1/chat/completions -H 'Content-Type: application/json' -d {data}"
    show_line(line)
    closing_table(
        "The server is ready; Ctrl-C ends it", [("url", url_of(line)), ("model", line.name), ("log", log)], None
    )
    get_console().print(Text("next:"), Text(ask), soft_wrap=True)


def show_held(url: str, layers: Sequence[int], log: str) -> None:
    """Where a server for extractions is, and how one attaches to it."""
    rows = [("url", url), ("layers", ", ".join(map(str, layers))), ("log", log)]
    closing_table("Held for extractions; Ctrl-C ends it", rows, f"python extract.py server=sglang server.urls=[{url}]")


def _spread(figures: dict[str, Any], name: str) -> str:
    return str(Spread(figures[name], figures[f"{name}_low"], figures[f"{name}_high"]))


def _drafter(summary: dict[str, Any]) -> str:
    return f"drafter {summary['drafter_dir']}" if summary["drafter_dir"] else "no drafter"


def gain(before: float, after: float) -> str:
    """63.6 → 90.0 (+41.5 %)"""
    return f"{short(before)} → {short(after)} ({after / before - 1:+.1%})"
