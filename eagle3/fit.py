"""The training run: loaders, Lightning's Trainer, run log and checkpoints, from step 0 or from a checkpoint."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, Strategy

from eagle3.checkpoints import Checkpoint, Checkpoints
from eagle3.data import loader
from eagle3.diverged import StopDiverged
from eagle3.module import DrafterModule
from eagle3.plan import TrainingPlan
from eagle3.record import Record
from eagle3.runlog import RunLog, SilentRunLog
from extract.progress import Progress

ACCELERATORS = {"cpu": "cpu", "cuda": "gpu"}
STRATEGIES: dict[str, Callable[[int], Strategy | str]] = {
    "auto": lambda devices: "auto",
    # Buffers are frozen tables and sums of one rank: neither is to be sent around before every step.
    "ddp": lambda devices: DDPStrategy(broadcast_buffers=False),
    # One file with the whole state: a checkpoint does not tell how many processes wrote it.
    "fsdp": lambda devices: ModelParallelStrategy(
        data_parallel_size=devices, tensor_parallel_size=1, save_distributed_checkpoint=False
    ),
}
"""By the name that `hardware.strategy` gives them; all take the number of devices."""


class StopAfter(pl.Callback):
    """Ends the run at its last step. `should_stop` makes Lightning validate first, so the last step always counts."""

    def __init__(self, steps: int):
        self.steps = steps

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step >= self.steps:
            trainer.should_stop = True


def fit(plan: TrainingPlan, runlog: RunLog | SilentRunLog, run_dir: Path, start: Checkpoint | None, rank: int) -> None:
    """Trains to the last step; checkpoints and the best drafter lie in `run_dir` afterwards."""
    schedule, hardware = plan.schedule, plan.hardware
    start_step = start.step if start else 0
    remaining = schedule.total_steps - start_step
    assert remaining > 0, "a finished run has nothing to fit"
    runlog.expect("train", remaining)
    runlog.expect("val", schedule.validations - start_step // schedule.val_every_steps)

    samplers = plan.samplers(rank)
    samplers[0].set_start(start_step)
    loaders = [
        loader(split, sampler, num_workers=hardware.num_workers, pin_memory=hardware.accelerator == "cuda")
        for split, sampler in zip((plan.data.train, plan.data.val), samplers, strict=True)
    ]
    module = DrafterModule(plan.drafter, plan.teacher_head, plan.recipe)
    with Progress("train", schedule.total_steps, unit="steps", initial=start_step) as progress:
        record = Record(runlog, progress, start_step, schedule.steps_per_epoch)
        saver = Checkpoints(run_dir, record, start, plan.origin)
        trainer = pl.Trainer(
            accelerator=ACCELERATORS[hardware.accelerator],
            devices=hardware.devices,
            strategy=STRATEGIES[hardware.strategy](hardware.devices),
            precision=hardware.precision,
            accumulate_grad_batches=schedule.micro_batches,
            max_epochs=1,  # the sampler runs over all epochs in one iteration
            val_check_interval=min(schedule.val_every_steps, remaining) * schedule.micro_batches,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            logger=False,  # metrics go to the run log, never through Lightning's logging
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            callbacks=[record, StopDiverged(run_dir, record, plan.max_nonfinite_steps), saver, StopAfter(remaining)],
            default_root_dir=run_dir,
        )
        with _loud_interrupt():
            ckpt_path = start.trainer_state if start else None
            trainer.fit(module, loaders[0], loaders[1], ckpt_path=ckpt_path, weights_only=True)


@contextmanager
def _loud_interrupt() -> Iterator[None]:
    """Lightning answers Ctrl-C by ending the process without a word; here it stays what it is."""
    try:
        yield
    except SystemExit as error:
        raise KeyboardInterrupt from error
