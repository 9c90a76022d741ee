"""Checkpoints of a training: each a directory that is whole or does not exist, and servable as it lies.

    checkpoints/step-000120/config.json, model.safetensors   a drafter directory
                            trainer.ckpt                     Lightning's checkpoint: weights and optimizer, float32
                            complete.json                    step, figures, sizes, hashes: written last
    drafter/                                                 the best one so far, by val/accept_len (see eagle3.best)

A checkpoint is assembled under a temporary name, fsynced and renamed. A directory without a complete.json that
agrees with its files is passed over by name. A full disk while saving leaves the previous checkpoints as they are.
"""

import json
import logging
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from eagle3.best import Quality, quality
from eagle3.export.config import CONFIG, WEIGHTS, Origin
from eagle3.export.directory import save_drafter
from eagle3.record import Record
from extract.durable import sync
from extract.store_tensors import sha256_of

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
    val_loss: float
    best_step: int
    best_accept_len: float
    best_val_loss: float

    @property
    def trainer_state(self) -> Path:
        return self.path / TRAINER_STATE

    @property
    def quality(self) -> Quality:
        return quality(self.accept_len, self.val_loss, self.step)


FACTS = tuple(field.name for field in fields(Checkpoint) if field.name != "path")


def checkpoints(run_dir: Path) -> list[Checkpoint]:
    """The whole checkpoints of a run by rising step; others are named in a warning and passed over."""
    found = []
    for path in sorted((run_dir / "checkpoints").glob("step-*")):
        if path.suffix == ".tmp":
            continue  # a kill while saving left it; even if its files are whole, nothing refers to it
        read = _read(path)
        if isinstance(read, str):
            log.warning("%s is no whole checkpoint (%s) and is passed over", path, read)
        else:
            found.append(read)
    return sorted(found, key=lambda c: c.step)


def newest_sound(run_dir: Path) -> Checkpoint | None:
    """The checkpoint to go on from: the newest whose files are, byte for byte, what was written.

    If the best one before it is damaged, the best that is left takes its place.
    """
    found = checkpoints(run_dir)
    for half in sorted((run_dir / "checkpoints").glob("step-*.tmp")):
        log.warning("%s was still being written when its process died, and is passed over", half)
    for checkpoint in reversed(found):
        fault = _damaged_drafter(checkpoint.path) or _damaged_state(checkpoint.trainer_state)
        if fault is None:
            return _with_sound_best(checkpoint, found)
        log.warning("%s is damaged (%s) and is passed over", checkpoint.path, fault)
    return None


def is_published(run_dir: Path) -> bool:
    """Whether the best drafter lies where it should, as it was written."""
    return not isinstance(_read(run_dir / BEST), str) and _damaged_drafter(run_dir / BEST) is None


def _read(path: Path) -> Checkpoint | str:
    """A checkpoint by its complete.json and the sizes of its files, or what is wrong with it."""
    try:
        told = json.loads((path / COMPLETE).read_text())
        sizes, facts = dict(told["bytes"]), {name: told[name] for name in FACTS}
        told["sha256"].keys()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{COMPLETE}: {error}"
    for name, size in sizes.items():
        file = path / name
        if not file.exists():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    return Checkpoint(path, **facts)


def _damaged_drafter(path: Path) -> str | None:
    written: dict[str, str] = json.loads((path / COMPLETE).read_text())["sha256"]
    changed = [name for name, sha256 in written.items() if sha256_of(path / name) != sha256]
    return f"{' and '.join(changed)}: not the bytes that were written" if changed else None


def _damaged_state(trainer_state: Path) -> str | None:
    try:
        with zipfile.ZipFile(trainer_state) as archive:  # torch's format, which keeps a checksum of every tensor
            damaged = archive.testzip()
    except zipfile.BadZipFile as error:
        return f"{TRAINER_STATE}: {error}"
    return f"{TRAINER_STATE}: {damaged} fails its checksum" if damaged else None


def _with_sound_best(sound: Checkpoint, found: list[Checkpoint]) -> Checkpoint:
    earlier = {c.step: c for c in found if c.step < sound.step}
    if sound.best_step == sound.step:
        return sound
    best = earlier.get(sound.best_step)
    fault = "it is not whole" if best is None else _damaged_drafter(best.path)
    if fault is None:
        return sound
    left = [c for c in earlier.values() if c.step != sound.best_step and _damaged_drafter(c.path) is None]
    best = max([*left, sound], key=lambda c: c.quality)
    log.warning("the best checkpoint, of step %d, is damaged (%s); of those left step %d is the best",
                sound.best_step, fault, best.step)  # fmt: skip
    return replace(sound, best_step=best.step, best_accept_len=best.accept_len, best_val_loss=best.val_loss)


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
        self.best_val_loss = start.best_val_loss if start else float("nan")
        self.origin = origin

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """A crash may lie between saving a checkpoint and publishing it as the best."""
        if self.best_step >= 0 and trainer.is_global_zero:
            publish(self.run_dir, self.best_step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        step = self.record.start_step + trainer.global_step
        accept_len, loss = self.record.last_val["accept_len"], self.record.last_val["loss"]
        best = quality(self.best_accept_len, self.best_val_loss, self.best_step)
        if quality(accept_len, loss, step) > best:
            self.best_step, self.best_accept_len, self.best_val_loss = step, accept_len, loss
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
            self._complete(temporary, final, {"step": step, "accept_len": accept_len, "val_loss": loss})
            publish(self.run_dir, self.best_step)
            self._prune()

    def _complete(self, temporary: Path, final: Path, validated: dict[str, Any]) -> None:
        for file in (temporary / BEST).iterdir():
            file.replace(temporary / file.name)
        (temporary / BEST).rmdir()
        facts = validated | {
            "best_step": self.best_step,
            "best_accept_len": self.best_accept_len,
            "best_val_loss": self.best_val_loss,
            "bytes": {file.name: file.stat().st_size for file in sorted(temporary.iterdir())},
            "sha256": {name: sha256_of(temporary / name) for name in (CONFIG, WEIGHTS)},
        }
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
