"""Lightning callback: from the module's sums to the run log and the progress bar. Nothing goes through `self.log`.

One train row an optimizer step, one val row a validation, on the step of the whole run. Sums are reduced over all
ranks with one fixed set of tensors, so ranks can neither log different names nor wait for each other in vain.
"""

import math
import time
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from eagle3.metrics import SUMS, accept_len_of, rates
from eagle3.module import DrafterModule
from eagle3.runlog import Declared, RunLog, SilentRunLog
from extract.progress import Progress


def declared(ttt_steps: int) -> dict[str, Declared]:
    """Every metric of a training, once. Rates whose denominator can be empty are optional."""
    per_step = ("loss", "acc", "chain", "acc_top1", "alpha")
    optional = frozenset(f"{name}_{k}" for name in per_step for k in range(ttt_steps))
    optional |= {"coverage", "accept_len_all_rows"}
    counts = frozenset({"tokens", "supervised", "empty_supervision", "epoch", "skipped"})
    train = frozenset({"loss", "lr", "grad_norm", "tokens_per_s", "data_wait_share"}) | counts
    val = frozenset({"loss", "accept_len", "visited"}) | {f"accepted_{k}" for k in range(ttt_steps)}
    whole = frozenset(name for name in val if name not in ("loss", "accept_len"))
    return {
        "train": Declared(names=train, optional=optional, integer=counts),
        "val": Declared(names=val, optional=optional, integer=whole),
    }


class Record(pl.Callback):
    """Emits rows; `last_train` and `last_val` hold the newest for callbacks that come after this one."""

    def __init__(self, runlog: RunLog | SilentRunLog, progress: Progress, start_step: int, steps_per_epoch: int):
        self.runlog = runlog
        self.progress = progress
        self.start_step = start_step
        self.steps_per_epoch = steps_per_epoch
        self.last_train: dict[str, float] = {}
        self.last_val: dict[str, float] = {}
        self._emitted = 0
        self._tokens = 0
        self._waited_s = 0.0
        self._step_began = self._batch_ended = time.monotonic()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step_began = self._batch_ended = time.monotonic()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._waited_s += time.monotonic() - self._batch_ended

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: dict[str, Any], batch_idx: int
    ) -> None:
        self._tokens += int((batch["document"] >= 0).sum())
        if trainer.global_step > self._emitted:
            self._emitted = trainer.global_step
            self._emit_train(trainer, pl_module)
        self._batch_ended = time.monotonic()

    def _emit_train(self, trainer: pl.Trainer, module: DrafterModule) -> None:
        step = self.start_step + trainer.global_step
        tokens = torch.tensor([self._tokens], dtype=torch.float64, device=module.device)
        tokens = trainer.strategy.reduce(tokens, reduce_op="sum")
        sums = _reduced(trainer, module.train_sums)
        elapsed_s = time.monotonic() - self._step_began
        supervised = sums[SUMS.index("supervised")]
        values = rates(sums, module.recipe.step_decay) | {
            "lr": module.learning_rate(step - 1),
            "grad_norm": module.grad_norm,
            "skipped": int(not math.isfinite(module.grad_norm)),
            "tokens": int(tokens),
            "supervised": int(supervised[0]),
            "empty_supervision": int((supervised == 0).sum()),
            "epoch": (step - 1) // self.steps_per_epoch,
            "tokens_per_s": float(tokens) / elapsed_s,
            "data_wait_share": min(1.0, self._waited_s / elapsed_s),
        }
        self.last_train = values
        self.runlog.emit("train", step, values)
        self.progress.advance(1, **{name: round(values[name], 3) for name in ("loss", "acc_0") if name in values})
        module.train_sums.zero_()
        self._tokens, self._waited_s, self._step_began = 0, 0.0, time.monotonic()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        sums, visits = _reduced(trainer, pl_module.val_sums), _reduced(trainer, pl_module.val_visits)
        visited, *accepted = (int(count) for count in visits.tolist())
        accept_len = accept_len_of(visits)
        if accept_len is None:
            raise ValueError(
                "no greedy response of the validation split has two tokens in one packed row, so val/accept_len has "
                "no meaning; raise data.val_fraction or extraction.max_len"
            )
        self.last_val = rates(sums, pl_module.recipe.step_decay) | {
            "accept_len": accept_len,
            "visited": visited,
            **{f"accepted_{k}": count for k, count in enumerate(accepted)},
        }
        self.runlog.emit("val", self.start_step + trainer.global_step, self.last_val)
        self.runlog.sync()
        self.progress.advance(0, accept_len=round(accept_len, 3))
        pl_module.val_sums.zero_()
        pl_module.val_visits.zero_()
        self._step_began = self._batch_ended = time.monotonic()


def _reduced(trainer: pl.Trainer, sums: Tensor) -> Tensor:
    return trainer.strategy.reduce(sums.clone(), reduce_op="sum")
