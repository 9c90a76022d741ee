"""Ends a training that computes nothing but NaN, instead of letting it run to its last step."""

import math
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from eagle3.checkpoints import checkpoints
from eagle3.record import Record


class Diverged(ValueError):
    """Too many optimizer steps in a row had a loss or a gradient that is not finite."""


class StopDiverged(pl.Callback):
    """Raises `Diverged` on every rank alike. It must come after `Record`, whose reduced figures it reads."""

    def __init__(self, run_dir: Path, record: Record, at_most: int):
        self.run_dir, self.record, self.at_most = run_dir, record, at_most
        self.in_a_row = 0
        self._seen = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self._seen:
            return  # a micro-batch within a step
        self._seen = trainer.global_step
        told = self.record.last_train
        finite = math.isfinite(told["loss"]) and math.isfinite(told["grad_norm"])
        self.in_a_row = 0 if finite else self.in_a_row + 1
        if self.in_a_row >= self.at_most:
            raise Diverged(self._message(self.record.start_step + trainer.global_step))

    def _message(self, step: int) -> str:
        saved = checkpoints(self.run_dir)
        good = f"the last good checkpoint is {saved[-1].path}" if saved else "no checkpoint was saved before"
        return (
            f"loss or gradient was not finite in {self.in_a_row} optimizer steps in a row, up to step {step} "
            f"(optimizer.max_nonfinite_steps={self.at_most}); a gradient like that changes no weight, and {good}. "
            "Lower optimizer.lr, or check the captured states; drafter.init_from=DIR starts from there"
        )
