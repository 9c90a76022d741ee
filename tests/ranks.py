"""One training in one process or in two: the same rows, dealt out by the sampler, and what came of it."""

import os
import pickle
import queue
import socket
from dataclasses import dataclass, replace
from typing import Any

import pytorch_lightning as pl
import torch
from scripts import FORKS
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from eagle3.fit import STRATEGIES
from eagle3.metrics import accept_len_of
from eagle3.sampler import EMPTY_ROW, MicroBatch, StepSampler
from eagle3.supervision import row_counts
from tests.batches import Case, make_case

WORLD = 2


@dataclass(frozen=True)
class Job:
    """Packed rows by their documents' lengths, and how many of them make a step."""

    lengths: tuple[tuple[int, ...], ...]
    rows_per_step: int
    strategy: str
    written: float = 1.0
    seed: int | None = None
    """Of the order of rows; None keeps it."""
    poisoned: int | None = None
    """A row whose captured states are NaN."""

    def case(self) -> Case:
        case = make_case([list(row) for row in self.lengths], padding=1, seed=8, written=self.written)
        if self.poisoned is not None:
            case.batch["aux"][self.poisoned] = float("nan")
        return case


@dataclass
class Outcome:
    """What one process saw. Sums and counts are reduced over all of them, weights are whole."""

    weights: dict[str, Tensor]
    rows: list[tuple[int, int]]
    """(step, row) of every row that this process trained on."""
    sums: list[Tensor]
    norms: list[float]
    val_sums: Tensor
    accept_len: float | None


class Rows(Dataset[dict[str, Any]]):
    """The case's batch by the micro-batch; an empty row is padding only, as eagle3.data makes it."""

    def __init__(self, batch: dict[str, Any]):
        self.batch = {n: x for n, x in batch.items() if torch.is_tensor(x) and n not in ("supervised_total", "rows")}

    def __getitem__(self, micro: MicroBatch) -> dict[str, Any]:
        empty = torch.tensor(micro.rows) == EMPTY_ROW
        found = {name: x[list(micro.rows)].clone() for name, x in self.batch.items()}
        for name, x in found.items():
            x[empty] = -1 if name == "document" else 0
        totals = {"rows": torch.tensor(micro.rows), "supervised_total": torch.tensor(micro.supervised_total)}
        return found | totals | {"step": micro.step}


class Notes(pl.Callback):
    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []
        self.sums: list[Tensor] = []
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.rows += [(batch["step"], row) for row in batch["rows"].tolist() if row != EMPTY_ROW]
        if trainer.global_step > len(self.sums):
            self.sums.append(trainer.strategy.reduce(module.train_sums.clone(), reduce_op="sum"))
            self.norms.append(module.grad_norm)
            module.train_sums.zero_()

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.val_sums = trainer.strategy.reduce(module.val_sums.clone(), reduce_op="sum")
        self.accept_len = accept_len_of(trainer.strategy.reduce(module.val_visits.clone(), reduce_op="sum"))


def train(job: Job, rank: int = 0, world: int = 1) -> Outcome:
    """Two epochs and a validation at their end; one process takes a whole step at once."""
    case, micro_rows = job.case(), 1 if world > 1 else job.rows_per_step
    small = {name: case.batch[name] for name in ("input_ids", "loss_mask", "document", "top1")}
    _, supervised = row_counts(**small, in_draft_vocab=case.drafter.t2d, ttt_steps=case.recipe.ttt_steps)
    ranks = {"micro_rows": micro_rows, "world_size": world, "rank": rank}
    sampler = StepSampler(supervised, rows_per_step=job.rows_per_step, epochs=2, seed=job.seed, **ranks)
    # A large eps keeps Adam from blowing up the rounding of gradients that all but cancel.
    recipe = replace(
        case.recipe, micro_batches=sampler.micro_batches, total_steps=sampler.total_steps, noise_std=0.1, lr=0.05,
        eps=1e-2, clip_norm=0.5,
    )  # fmt: skip
    module, notes = replace(case, recipe=recipe).module(), Notes()
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy=STRATEGIES[job.strategy if world > 1 else "auto"](world),
        precision="32-true", accumulate_grad_batches=sampler.micro_batches, max_epochs=1, logger=False,
        val_check_interval=len(sampler), check_val_every_n_epoch=None, num_sanity_val_steps=0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, callbacks=[notes],
    )  # fmt: skip
    loaders = [
        DataLoader(Rows(case.batch), sampler=one, batch_size=None)
        for one in (sampler, StepSampler.whole(supervised, **ranks))
    ]
    trainer.fit(module, *loaders)
    weights = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in case.drafter.named_parameters()
    }
    return Outcome(weights, notes.rows, notes.sums, notes.norms, notes.val_sums, notes.accept_len)


def in_two_processes(jobs: list[Job], timeout_s: float = 120) -> list[list[Outcome]]:
    """Of each job, the outcome of each rank; AssertionError if they do not end in time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = FORKS.Queue()
    processes = [FORKS.Process(target=_rank, args=(jobs, rank, port, results), daemon=True) for rank in range(WORLD)]
    for process in processes:
        process.start()
    try:
        found = dict(results.get(timeout=timeout_s) for _ in processes)
    except queue.Empty:
        raise AssertionError(f"no end after {timeout_s} s: {[p.exitcode for p in processes]}") from None
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    by_rank = [pickle.loads(found[rank]) for rank in range(WORLD)]
    return [list(of_ranks) for of_ranks in zip(*by_rank, strict=True)]


def _rank(jobs: list[Job], rank: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(WORLD)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # As bytes: tensors in a queue are handles that die with their process.
    results.put((rank, pickle.dumps([train(job, rank, WORLD) for job in jobs])))
