"""Optimizer steps through Lightning's Trainer, as train.py runs them, on batches that lie ready."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from eagle3.module import DrafterModule
from tests.batches import Case

Batch = dict[str, Any]


class Watch(pl.Callback):
    """Learning rate, gradient norm after clipping and sums of every optimizer step."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.norms: list[float] = []
        self.sums: list[Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step > len(self.rates):
            self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
            gradients = [p.grad for p in pl_module.drafter.parameters() if p.grad is not None]
            norms = [g.norm() for g in gradients]
            self.norms.append(float(torch.stack(norms).norm()) if norms else math.nan)  # of a skipped step
            self.sums.append(pl_module.train_sums.clone())
            pl_module.train_sums.zero_()


def train(
    module: DrafterModule, batches: Sequence[Batch], precision: str = "32-true", val: Sequence[Batch] = ()
) -> Watch:
    """One step after another, each followed by a validation if there is anything in `val`."""
    watch = Watch()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        precision=precision,  # type: ignore[arg-type]
        accumulate_grad_batches=module.recipe.micro_batches,
        max_epochs=1,
        val_check_interval=module.recipe.micro_batches,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[watch],
    )
    loaders = [DataLoader(of, batch_size=None) if of else None for of in (batches, val)]  # type: ignore[arg-type]
    trainer.fit(module, *loaders)
    return watch


def steps_of(batch: Batch, steps: int, micro_batches: int = 1) -> list[Batch]:
    """The batch as `steps` optimizer steps, each dealt to micro-batches by rows."""
    out = []
    for step in range(steps):
        for rows in torch.arange(len(batch["rows"])).chunk(micro_batches):
            of_rows = {n: x[rows] for n, x in batch.items() if n not in ("step", "supervised_total")}
            out.append(of_rows | {"step": step, "supervised_total": batch["supervised_total"]})
    return out


def with_recipe(case: Case, **changes: Any) -> Case:
    return replace(case, recipe=replace(case.recipe, **changes))


def orthonormal_head(case: Case) -> Case:
    """A state along a token's own row of the head is one that scores this token highest."""
    return replace(case, head=torch.linalg.qr(case.head.T).Q.T.contiguous())


def copies(drafter: torch.nn.Module) -> dict[str, Tensor]:
    named = [*drafter.named_parameters(), *drafter.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}
