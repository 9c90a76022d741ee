"""Tests of the loader of eagle3.data where it is used: under Lightning, and in two processes at once."""

import contextlib
import multiprocessing
from collections import Counter
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist

from eagle3.data import PackedStore, loader
from eagle3.sampler import EMPTY_ROW, StepSampler
from extract.store import open_store
from tests.packed import LENGTHS, all_rows, make_store, sample, sampler_for


class Killed(Exception):
    """Stands for a process that dies."""


class Recorder(pl.LightningModule):
    """Records what training_step gets. Saves before step `stop` begins, then dies. The model is one weight."""

    def __init__(self, loaders: list, stop: int | None, checkpoint: Path) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.train_dataloader = lambda: loaders[0]
        self.val_dataloader = lambda: loaders[1]
        self.stop, self.checkpoint = stop, checkpoint
        self.trained: list[tuple[int, list[int]]] = []
        self.validated: list[list[int]] = []

    def training_step(self, batch: dict, index: int) -> torch.Tensor:
        assert batch["step"] == self.global_step
        self.trained.append((batch["step"], batch["rows"].tolist()))
        return self.weight * batch["supervised_total"].sum()

    def validation_step(self, batch: dict, index: int) -> None:
        self.validated.append(batch["rows"].tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_end(self, *_: object) -> None:
        if self.global_step == self.stop:
            self.trainer.save_checkpoint(self.checkpoint)
            raise Killed


def fit(dataset: PackedStore, folder: Path, *, start: int = 0, stop: int | None = None) -> Recorder:
    """Train 3 epochs of 4 steps of 2 micro-batches, or the part of it from step `start` to step `stop`."""
    sampler = sampler_for(dataset, epochs=3, rows_per_step=2, micro_rows=1)
    sampler.set_start(start)
    whole = StepSampler.whole(sampler.supervised, micro_rows=2)
    loaders = [loader(dataset, one, num_workers=1, pin_memory=False) for one in (sampler, whole)]
    module = Recorder(loaders, stop, folder / "last.ckpt")
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, use_distributed_sampler=False, logger=False,
        accumulate_grad_batches=sampler.micro_batches, num_sanity_val_steps=0, default_root_dir=folder,
        val_check_interval=sampler.steps_per_epoch * sampler.micro_batches, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with contextlib.suppress(Killed):
        trainer.fit(module, ckpt_path=folder / "last.ckpt" if start else None)
    return module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stop", [2, 4, 5])
def test_lightning_resumes_within_an_epoch_and_at_its_end(tmp_path: Path, stop: int):
    store = make_store(tmp_path / "store", [sample(n, length) for n, length in enumerate(LENGTHS)])
    dataset = all_rows(store)
    sampler = sampler_for(dataset, epochs=3, rows_per_step=2, micro_rows=1)
    assert (sampler.steps_per_epoch, sampler.micro_batches) == (4, 2)
    expected = [(micro.step, list(micro.rows)) for micro in sampler]
    unbroken = fit(dataset, tmp_path)
    assert unbroken.trained == expected
    rows = sorted(row for rows in unbroken.validated for row in rows if row != EMPTY_ROW)
    assert rows == sorted(3 * list(range(len(dataset))))

    begun = fit(dataset, tmp_path, stop=stop)
    continued = fit(dataset, tmp_path, start=stop)
    assert begun.trained + continued.trained == expected


def one_rank(rank: int, path: Path, rendezvous: Path, results: "multiprocessing.Queue") -> None:
    dist.init_process_group("gloo", init_method=rendezvous.as_uri(), rank=rank, world_size=2)
    dataset = all_rows(open_store(path))
    sampler = sampler_for(dataset, rows_per_step=4, micro_rows=1, epochs=1, world_size=2, rank=rank)
    rows = []
    for batch in loader(dataset, sampler, num_workers=0, pin_memory=False):
        step = torch.tensor([batch["step"]])
        dist.all_reduce(step)  # hangs if the other rank has no micro-batch left
        assert int(step) == 2 * batch["step"]
        rows += [(batch["step"], row) for row in batch["rows"].tolist() if row != EMPTY_ROW]
    dist.destroy_process_group()
    results.put(rows)


def test_two_processes_end_together_with_five_and_four_packs(tmp_path: Path):
    store = make_store(tmp_path / "store", [sample(n, 12) for n in range(9)])
    assert len(all_rows(store)) == 9
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = (store.path, tmp_path / "rendezvous", results)
    processes = [context.Process(target=one_rank, args=(rank, *arguments), daemon=True) for rank in (0, 1)]
    for process in processes:
        process.start()
    seen = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert sorted(map(len, seen)) == [4, 5]
    assert Counter(row for rows in seen for _, row in rows) == Counter(range(9))
    assert {step for rows in seen for step, _ in rows} == {0, 1, 2}
