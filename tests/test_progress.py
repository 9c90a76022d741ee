"""Progress in a file and on a terminal, and the closing table."""

import io
import os
import pty
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rich
from rich.console import Console

from extract.progress import Progress, closing_table

ROOT = Path(__file__).parent.parent
SLOW_BATCH = """
import time
from extract.progress import Progress
with Progress("capture", 1000, every_s=0.2, initial=200) as progress:
    progress.advance(50, loss=2.345678)
    time.sleep(1.1)
    progress.advance(750)
"""


@pytest.fixture
def printed(monkeypatch):
    """What the shared console prints, as a file of 80 columns."""
    buffer = io.StringIO()
    monkeypatch.setattr(rich, "_console", Console(file=buffer, width=80, force_terminal=False))
    return buffer


def test_a_file_gets_a_line_in_time_although_one_batch_takes_long():
    command = [sys.executable, "-c", SLOW_BATCH]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        arrived = [(time.monotonic(), line.rstrip()) for line in process.stdout]
    lines = [line for _, line in arrived]
    assert process.returncode == 0 and 4 <= len(lines) <= 7
    assert arrived[-1][0] - arrived[0][0] > 0.5, "lines must be flushed one by one"
    assert re.fullmatch(r"capture: 25% 250/1,000 tokens, [\d.,]+ tokens/s, 0:00 gone, 0:0\d left, loss 2.346", lines[0])
    assert lines[-1].startswith("capture: 100% 1,000/1,000 tokens") and lines[-1].endswith("done")
    assert "left" not in lines[-1]


def test_initial_counts_for_the_share_and_not_for_the_rate(capsys, printed):
    with Progress("x", 1_000_000, unit="samples", initial=900_000) as progress:
        time.sleep(0.05)
        progress.advance(10)
    line = capsys.readouterr().out
    assert "90% 900,010/1,000,000 samples" in line
    assert float(re.search(r"([\d.,]+) samples/s", line)[1].replace(",", "")) < 250


def test_a_failure_says_stopped_and_ends_the_thread(capsys, printed):
    with pytest.raises(KeyError), Progress("train", 10, unit="steps") as progress:
        raise KeyError("x")
    assert capsys.readouterr().out.rstrip().endswith("stopped")
    assert progress._thread is not None and not progress._thread.is_alive()


def test_nothing_to_do(capsys, printed):
    with Progress("teacher", 0):
        pass
    assert "teacher: 100% 0/0 tokens" in capsys.readouterr().out


def test_a_terminal_gets_one_live_bar():
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_BATCH], cwd=ROOT, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 4096):
            seen += part
    except OSError:  # how a terminal's end is told on Linux
        pass
    os.close(ours)
    assert process.wait() == 0
    text = seen.decode()
    assert "\x1b[" in text and "100%" in text and "1,000/1,000" in text and "tokens/s" in text and "left" in text


def test_the_table_fits_and_cuts_nothing(printed):
    path = "/scratch/" + "very-long-directory-name/" * 8 + "drafter"
    rows = [("drafter", path), ("val/accept_len", "1.50"), ("odd [bold]name[/bold] :smile:", "[red]x[/red]")]
    closing_table("train", rows, None)
    out = printed.getvalue()
    assert max(map(len, out.splitlines())) <= 80
    assert path in re.sub(r"[\s│]", "", out)
    assert "…" not in out and "[red]x[/red]" in out and ":smile:" in out


def test_the_next_command_fits_and_can_be_pasted(printed):
    command = "python train.py experiment=quickstart " + " ".join(f"key{i}.name=value{i}" for i in range(12))
    closing_table("extract", [("tokens", "7,680")], command)
    out = printed.getvalue()
    assert max(map(len, out.splitlines())) <= 80
    pasted = out[out.index("python") :].replace("\\\n", "")
    assert pasted.split() == command.split()


def test_the_next_command_is_never_broken_inside_quotes(printed):
    words = ["python", "train.py", *(f"store{i}=a folder of {i}'s" for i in range(12))]
    closing_table("extract", [], shlex.join(words))
    out = printed.getvalue()
    assert shlex.split(out[out.index("python") :].replace("\\\n", "")) == words
