"""One optimizer step as train.py runs it, on random states: tokens/s, memory, and the share of the matrix rate.

    python -m benchmarks.training_step --shape llama8b kimi --supervised 0.5 0.75 1.0 --peers DIR

A row for each shape and supervised share, and for each peer that DIR brings (benchmarks.peers) one of each shape.
Lightning's Trainer, the module, clipping, optimizer and ledger are those of a training. Documents have 512 tokens, of
which the last ones are supervised. Times are CUDA events; medians over the timed steps.
"""

import argparse
import gc
import statistics
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from rich import box, get_console
from rich.table import Table
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader

from benchmarks.needed import flops_needed, matrix_rate
from benchmarks.peers import PEERS, compare, measure_peer, script_in
from benchmarks.record import write_result
from eagle3.drafter import DrafterShape, Eagle3Drafter
from eagle3.module import DrafterModule, Recipe
from eagle3.record import Record, declared
from eagle3.runlog import open_runlog
from eagle3.supervision import row_counts
from eagle3.vocab import DraftVocab
from extract.progress import Progress

SIZES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32,
             "vocab_size": 2048, "draft_vocab_size": 512},
    "llama8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128,
                "vocab_size": 128256, "draft_vocab_size": 32000},
    "kimi": {"hidden_size": 7168, "intermediate_size": 18432, "num_heads": 64, "num_kv_heads": 64, "head_dim": 128,
             "vocab_size": 163840, "draft_vocab_size": 32000},
}  # fmt: skip
STEPS = {"tiny": 3, "llama8b": 7, "kimi": 3}
"""K of each shape, where --ttt does not say another."""
DOCUMENT = 512
BATCHES = 2
PEER_TIMEOUT_S = 280


def shape_of(name: str) -> DrafterShape:
    return DrafterShape(
        **SIZES[name], capture_layers=(2, 16, 29), rms_norm_eps=1e-5, max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip


def build(shape: DrafterShape, options: argparse.Namespace, device: torch.device) -> DrafterModule:
    """Random weights; the verifier's tables are bf16, as they are in a training."""
    torch.manual_seed(0)
    kept = torch.randperm(shape.vocab_size)[: shape.draft_vocab_size].sort().values
    vocab = DraftVocab(kept, shape.vocab_size, None)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    table = torch.randn(shape.vocab_size, shape.hidden_size, device=device, dtype=dtype) * 0.02
    drafter = Eagle3Drafter(shape, vocab, table).to(device)
    head = torch.randn(shape.draft_vocab_size, shape.hidden_size, device=device, dtype=dtype)
    head *= 2 / shape.hidden_size**0.5
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.normal_(0, 0.02) if weight.ndim > 1 else weight.fill_(1)
        drafter.lm_head.weight.copy_(head)
    recipe = Recipe(
        ttt_steps=options.ttt, step_decay=0.8, noise_std=0.05, loss="soft_ce", lr=1e-5, betas=(0.9, 0.95), eps=1e-8,
        weight_decay=0.0, warmup_ratio=0.0, floor_ratio=0.0, clip_norm=0.5, micro_batches=1, seed=0,
        total_steps=options.warmup + options.steps,
    )  # fmt: skip
    return DrafterModule(drafter, head, recipe)


def make_batch(module: DrafterModule, options: argparse.Namespace, number: int) -> dict[str, Any]:
    """A micro-batch on the device. Every top-1 token is draftable, so that all that is active is supervised."""
    drafter, shape = module.drafter, module.drafter.shape
    device, dtype = drafter.lm_head.weight.device, module.teacher_head.dtype
    generator = torch.Generator(device).manual_seed(number)
    size = (options.rows, options.seq_len)
    column = torch.arange(options.seq_len, device=device).expand(size)
    ids = torch.randint(shape.vocab_size, size, generator=generator, device=device)
    batch: dict[str, Any] = {
        "input_ids": ids,
        "document": column // DOCUMENT,
        "position": column % DOCUMENT,
        "loss_mask": column % DOCUMENT >= round(DOCUMENT * (1 - options.supervised)),
        "top1": drafter.target_ids(ids % shape.draft_vocab_size),
        "greedy": torch.ones(size, dtype=torch.bool, device=device),
        "aux": torch.randn(*size, 3 * shape.hidden_size, generator=generator, device=device, dtype=dtype),
        "last": torch.randn(*size, shape.hidden_size, generator=generator, device=device, dtype=dtype),
        "rows": torch.arange(options.rows),
        "step": number,
    }
    batch["lse"] = torch.stack([_lse(row, module.teacher_head) for row in batch["last"]])
    counted = {name: batch[name] for name in ("input_ids", "loss_mask", "document", "top1")}
    _, supervised = row_counts(**counted, in_draft_vocab=drafter.t2d, ttt_steps=options.ttt)
    return batch | {"supervised_total": supervised.sum(0)}


def _lse(last: Tensor, head: Tensor) -> Tensor:
    """Of a verifier that gives nine tenths of its mass to the draft vocabulary."""
    return torch.cat([(part @ head.T).float().logsumexp(-1) for part in last.split(512)]) + 0.1


@dataclass(eq=False)
class Clock(pl.Callback):
    """CUDA events around forward, backward and optimizer, and the memory at both ends of a step."""

    warmup: int

    def __post_init__(self) -> None:
        self.marks: list[list[Any]] = []
        self.held = 0
        self.graphs = 0

    def _mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True) if torch.cuda.is_available() else None
        if event is not None:
            event.record()
        self.marks[-1].append(event)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.warmup:
            self.graphs = counters["stats"]["unique_graphs"]
            if torch.cuda.is_available():
                self.held = torch.cuda.memory_allocated()  # weights, gradients, moments, tables and the batches
                torch.cuda.reset_peak_memory_stats()
        self.marks.append([])
        self._mark()

    def on_before_backward(self, *_: Any) -> None:
        self._mark()

    def on_after_backward(self, *_: Any) -> None:
        self._mark()

    def on_train_batch_end(self, *_: Any) -> None:
        self._mark()

    def milliseconds(self) -> dict[str, float]:
        """Medians; a step lasts until the next one begins."""
        steps = self.marks[self.warmup :]
        between = [(0, 1, "forward_ms"), (1, 2, "backward_ms"), (2, 3, "optimizer_ms")]
        out = {name: statistics.median(s[a].elapsed_time(s[b]) for s in steps) for a, b, name in between}
        whole = [a[0].elapsed_time(b[0]) for a, b in pairwise(steps)]
        return {"step_ms": statistics.median(whole), **out}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = shape_of(options.shape)
    module = build(shape, options, device)
    batches = [make_batch(module, options, number) for number in range(BATCHES)]
    counted = {name: batches[0][name] for name in ("input_ids", "loss_mask", "document", "top1")}
    in_vocab = module.drafter.t2d
    active = row_counts(**counted, in_draft_vocab=in_vocab, ttt_steps=options.ttt)[0].sum(0).tolist()
    clock, steps = Clock(options.warmup), options.warmup + options.steps
    rate = matrix_rate(device)
    with tempfile.TemporaryDirectory() as directory, open_ledger(Path(directory), options) as runlog:
        runlog.expect("train", steps)
        with Progress("train", steps, unit="steps") as progress:
            trainer = pl.Trainer(
                accelerator="gpu" if device.type == "cuda" else "cpu", devices=1, precision=options.precision,
                max_steps=steps, max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False, callbacks=[clock, Record(runlog, progress, 0, steps)],
            )  # fmt: skip
            trainer.fit(module, DataLoader([batches[i % BATCHES] for i in range(steps)], batch_size=None))
    return figures(options, module, active, clock, rate)


def open_ledger(directory: Path, options: argparse.Namespace):
    return open_runlog(
        directory, declared(options.ttt), mode="local", project="benchmark", entity=None, group="benchmark",
        name="training_step", job_type="train", tags=[], config={}, csv=False, tensorboard=False,
    )  # fmt: skip


def figures(
    options: argparse.Namespace, module: DrafterModule, active: list[int], clock: Clock, rate: float
) -> dict[str, Any]:
    tokens, shape = options.rows * options.seq_len, module.drafter.shape
    flops = flops_needed(shape, tokens=tokens, active=active, document=DOCUMENT)
    row: dict[str, Any] = {**vars(options), "trainable": sum(p.numel() for p in module.drafter.parameters()),
                           "flops_needed": flops, "active": active}  # fmt: skip
    row["recompilations"] = counters["stats"]["unique_graphs"] - clock.graphs
    if not torch.cuda.is_available():
        return row
    times = clock.milliseconds()
    peak = torch.cuda.max_memory_allocated()
    return row | times | {
        "tokens_per_s": tokens / times["step_ms"] * 1000,
        "peak_gib": peak / 2**30,
        "activation_gib": (peak - clock.held) / 2**30,
        "matrix_tflops": rate / 1e12,
        "share_of_matrix_rate": flops / (times["step_ms"] / 1000) / rate,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    table = Table("figure", "value", box=box.SIMPLE)
    for name, value in row.items():
        table.add_row(name, f"{value:,.3f}" if isinstance(value, float) else str(value))
    get_console().print(table)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SIZES, nargs="+", required=True)
    parser.add_argument("--ttt", type=int, default=None, help="K; by default 7 for llama8b and 3 for the others")
    parser.add_argument("--seq-len", type=int, default=2048, help="T, tokens of a packed row")
    parser.add_argument("--rows", type=int, default=4, help="B, packed rows of a step")
    parser.add_argument("--supervised", type=float, nargs="+", default=[0.75], help="share of each document")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--precision", choices=("bf16-mixed", "32-true"), default="bf16-mixed")
    parser.add_argument(
        "--peers", type=Path, default=None, help="a folder with bench_peers.py: measure those beside us"
    )
    parser.add_argument("--json", type=Path, default=None, help="by default outputs/benchmarks/training_step.json")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parsed(arguments)
    script = script_in(options.peers) if options.peers else None
    ours: list[dict[str, Any]] = []
    peers: list[dict[str, Any]] = []
    for shape in options.shape:
        ttt = STEPS[shape] if options.ttt is None else options.ttt
        sizes = {"shape": shape, "ttt": ttt, "seq_len": options.seq_len, "rows": options.rows,
                 "steps": options.steps, "warmup": options.warmup}  # fmt: skip
        torch._dynamo.reset()  # one shape's sizes are no reason to compile another's for any size
        for share in options.supervised:
            one = argparse.Namespace(**sizes, supervised=share, precision=options.precision)
            ours.append({"who": "ours", **measure(one)})
            show(ours[-1])
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # to the peers, which are other processes
        for peer in PEERS if script else ():
            peers.append(measure_peer(peer, script, **sizes, timeout_s=PEER_TIMEOUT_S))
            show(peers[-1])
    rows = [row | compare(row, peers) for row in ours] + peers
    get_console().print(str(write_result("training_step", rows, path=options.json)))


if __name__ == "__main__":
    main(sys.argv[1:])
