"""Checkpoints of a training: each a directory that is whole or does not exist, and servable as it lies.

    checkpoints/step-000120/config.json, model.safetensors   a drafter directory
                            trainer.ckpt                     Lightning's checkpoint: weights and optimizer, float32
                            complete.json                    step, figures, sizes: written last
    drafter/                                                 the best one so far, by val/accept_len

A checkpoint is assembled under a temporary name, fsynced and renamed. A directory without a complete.json that
agrees with its files is passed over by name. A full disk while saving leaves the previous checkpoints as they are.
"""

import json
import logging
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from eagle3.export.config import Origin
from eagle3.export.directory import save_drafter
from eagle3.record import Record
from extract.durable import sync

log = logging.getLogger(__name__)

COMPLETE, TRAINER_STATE, BEST = "complete.json", "trainer.ckpt", "drafter"
KEEP = 2
"""Newest checkpoints that stay, besides the best."""
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
"""Weights that are sharded over processes come to rank 0 as a whole; the others get nothing."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    accept_len: float
    best_step: int
    best_accept_len: float

    @property
    def trainer_state(self) -> Path:
        return self.path / TRAINER_STATE


def checkpoints(run_dir: Path) -> list[Checkpoint]:
    """The whole checkpoints of a run by rising step; others are named in a warning and passed over."""
    found = []
    for path in sorted((run_dir / "checkpoints").glob("step-*")):
        if path.suffix == ".tmp":
            continue  # a kill while saving left it; even if its files are whole, nothing refers to it
        fault = _fault(path)
        if fault:
            log.warning("%s is no whole checkpoint (%s) and is passed over", path, fault)
        else:
            facts = json.loads((path / COMPLETE).read_text())
            found.append(Checkpoint(path, *(facts[f] for f in ("step", "accept_len", "best_step", "best_accept_len"))))
    return sorted(found, key=lambda c: c.step)


def newest_sound(run_dir: Path) -> Checkpoint | None:
    """The checkpoint to go on from: the newest whose trainer state is, byte for byte, what was written."""
    for checkpoint in reversed(checkpoints(run_dir)):
        fault = _damage(checkpoint.trainer_state)
        if fault is None:
            return checkpoint
        log.warning("%s is damaged (%s: %s) and is passed over", checkpoint.path, TRAINER_STATE, fault)
    return None


def _damage(trainer_state: Path) -> str | None:
    try:
        with zipfile.ZipFile(trainer_state) as archive:  # torch's format, which keeps a checksum of every tensor
            damaged = archive.testzip()
    except zipfile.BadZipFile as error:
        return str(error)
    return f"{damaged} fails its checksum" if damaged else None


def _fault(path: Path) -> str | None:
    try:
        sizes: dict[str, int] = json.loads((path / COMPLETE).read_text())["bytes"]
    except (OSError, ValueError, KeyError) as error:
        return f"{COMPLETE}: {error}"
    for name, size in sizes.items():
        file = path / name
        if not file.exists():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    return None


def publish(run_dir: Path, best_step: int) -> None:
    """Makes drafter/ the best checkpoint's drafter: a link is switched, so that it is never missing or mixed."""
    best = run_dir / "checkpoints" / f"step-{best_step:06d}"
    link, fresh = run_dir / BEST, run_dir / f"{BEST}.tmp"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(best.relative_to(run_dir), target_is_directory=True)
    fresh.replace(link)


class Checkpoints(pl.Callback):
    """Saves after every validation. It must come after `Record` in the list of callbacks, whose figures it reads."""

    def __init__(self, run_dir: Path, record: Record, start: Checkpoint | None, origin: Origin):
        self.run_dir = run_dir
        self.record = record
        self.best_step = start.best_step if start else -1
        self.best_accept_len = start.best_accept_len if start else float("-inf")
        self.origin = origin
        if start:
            # A crash may lie between saving a checkpoint and publishing it as the best.
            publish(self.run_dir, self.best_step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        step = self.record.start_step + trainer.global_step
        accept_len = self.record.last_val["accept_len"]
        if accept_len > self.best_accept_len:
            self.best_step, self.best_accept_len = step, accept_len
        final = self.run_dir / "checkpoints" / f"step-{step:06d}"
        temporary = final.with_name(final.name + ".tmp")
        # A collective, as is save_checkpoint below.
        state: Mapping[str, Any] = get_model_state_dict(pl_module.drafter, options=WHOLE)
        if trainer.is_global_zero:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            save_drafter(pl_module.drafter, temporary / BEST, origin=self.origin, state=state)
        trainer.save_checkpoint(temporary / TRAINER_STATE)
        if trainer.is_global_zero:
            self._complete(temporary, final, step, accept_len)
            publish(self.run_dir, self.best_step)
            self._prune()

    def _complete(self, temporary: Path, final: Path, step: int, accept_len: float) -> None:
        for file in (temporary / BEST).iterdir():
            file.replace(temporary / file.name)
        (temporary / BEST).rmdir()
        facts = {
            "step": step, "accept_len": accept_len,
            "best_step": self.best_step, "best_accept_len": self.best_accept_len,
            "bytes": {file.name: file.stat().st_size for file in sorted(temporary.iterdir())},
        }  # fmt: skip
        (temporary / COMPLETE).write_text(json.dumps(facts, indent=2))
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        shutil.rmtree(final, ignore_errors=True)
        temporary.replace(final)
        sync(final.parent)

    def _prune(self) -> None:
        keep = {c.step for c in checkpoints(self.run_dir)[-KEEP:]} | {self.best_step}
        for checkpoint in checkpoints(self.run_dir):
            if checkpoint.step not in keep:
                shutil.rmtree(checkpoint.path)
