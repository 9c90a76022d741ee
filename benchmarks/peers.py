"""Other trainers' optimizer step beside ours: runs DIR/bench_peers.py, which brings them along, and reads what it says.

A peer computes every row whatever is supervised, so that one run of it stands beside ours at any supervised share.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPT = "bench_peers.py"


@dataclass(frozen=True)
class Peer:
    name: str
    """As `--peer` takes it."""
    told: str
    options: tuple[str, ...]
    """What makes it do the work that EAGLE-3 asks for, and lets it run."""
    state_bytes: int
    """A trained weight's gradient and moments, which it makes in its first step, after it is built."""


PEERS = (
    Peer("speculators", "speculators 0.9.0",
         ("--optimizer", "adamw", "--train-lm-head", "--vanilla-norms", "--eager-loss"), 4 + 8),
    Peer("specforge", "SpecForge 0.2.0", (), 2 + 8),
)  # fmt: skip


def script_in(directory: Path) -> Path:
    """Raises ValueError where there is no such script."""
    script = directory / SCRIPT
    if not script.is_file():
        raise ValueError(f"--peers {directory}: there is no {SCRIPT} in it; name the folder that has it")
    return script.resolve()


def measure_peer(
    peer: Peer, script: Path, *, shape: str, ttt: int, seq_len: int, rows: int, steps: int, warmup: int, timeout_s: int
) -> dict[str, Any]:
    """Its row, or one that says in `error` why there is none."""
    with tempfile.TemporaryDirectory() as directory:
        found = Path(directory) / "row.json"
        sizes = {"shape": shape, "ttt": ttt, "seq-len": seq_len, "batch": rows, "steps": steps, "warmup": warmup}
        command = [sys.executable, str(script), "--peer", peer.name, *peer.options, "--json", str(found)]
        command += [word for key, value in sizes.items() for word in (f"--{key}", str(value))]
        try:
            done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return {"who": peer.told, "shape": shape, "ttt": ttt, "error": f"no end after {timeout_s} s"}
        if not found.exists():
            last = (done.stderr.strip().splitlines() or [""])[-1]
            return {"who": peer.told, "shape": shape, "ttt": ttt, "error": f"exit code {done.returncode}: {last}"}
        return row_of(peer, json.loads(found.read_text()))


def row_of(peer: Peer, said: dict[str, Any]) -> dict[str, Any]:
    """What it said, and its memory in our terms: `activation_gib` is the peak less all that outlives a step."""
    # Its command line names temporary files, and three quarters of each document are all that its masks can say.
    row = {"who": peer.told, "supervised": 0.75, **{key: value for key, value in said.items() if key != "argv"}}
    if "error" in said or said["peak_mem_gib"] is None:  # None: measured on a CPU
        return row
    state = said["params_trainable"] * peer.state_bytes / 2**30
    return row | {"peak_gib": said["peak_mem_gib"],
                  "activation_gib": said["peak_mem_gib"] - said["mem_built_gib"] - state}  # fmt: skip


def compare(ours: dict[str, Any], peers: list[dict[str, Any]]) -> dict[str, float]:
    """Our speed over the faster peer's, and our activation memory over the leaner one's; nothing without peers."""
    here = [row for row in peers if row["shape"] == ours["shape"] and row["ttt"] == ours["ttt"] and "error" not in row]
    here = [row for row in here if "activation_gib" in row]
    if not here or "tokens_per_s" not in ours:
        return {}
    return {
        "times_the_faster_peer": ours["tokens_per_s"] / max(row["tokens_per_s"] for row in here),
        "of_the_leaner_peers_activations": ours["activation_gib"] / min(row["activation_gib"] for row in here),
    }
