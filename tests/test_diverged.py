"""A training that computes NaN ends with a message that names the last good checkpoint; NaN rows are in its ledger."""

import json
import math
from types import SimpleNamespace

import pytest
from scripts import run
from tiny_job import settings

from eagle3.diverged import Diverged, StopDiverged
from eagle3.runlog import read_ledger

NAN = math.nan


def steps_until_it_stops(folder, figures, at_most, micro_batches=1):
    """How many steps it allows, of those with these (loss, gradient norm); all of them if it does not stop."""
    record = SimpleNamespace(start_step=100, last_train={})
    stop = StopDiverged(folder, record, at_most)
    for done, (loss, norm) in enumerate(figures, start=1):
        for _ in range(micro_batches):  # the first of them ends the step before, as Lightning counts
            record.last_train = {"loss": loss, "grad_norm": norm}
            try:
                stop.on_train_batch_end(SimpleNamespace(global_step=done))
            except Diverged as error:
                return done, str(error)
    return len(figures), ""


@pytest.mark.parametrize("bad", [(NAN, 1.0), (1.0, NAN), (math.inf, math.inf)])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_it_stops_after_so_many_steps_in_a_row_and_not_before(tmp_path, bad, micro_batches):
    good = (1.0, 1.0)
    assert steps_until_it_stops(tmp_path, [bad, bad, good] * 5, 3, micro_batches) == (15, "")
    done, told = steps_until_it_stops(tmp_path, [good, bad, bad, good, bad, bad, bad, bad], 3, micro_batches)
    assert done == 7 and "in 3 optimizer steps in a row, up to step 107" in told
    assert "optimizer.max_nonfinite_steps=3" in told and "no checkpoint was saved before" in told


def test_a_training_that_diverges_ends_and_names_its_last_good_checkpoint(folder, extracted):
    told = settings(optimizer__lr=1e30, optimizer__max_nonfinite_steps=3, data__val_every_steps=2, tracking="offline",
                    optimizer__warmup_ratio=0, hydra__run__dir="diverged", optimizer__epochs=8)  # fmt: skip
    done = run("train.py", *told, cwd=folder)
    assert done.code == 1 and "Traceback" not in done.output
    rows = [row for row in read_ledger(folder / "diverged") if row.split == "train"]
    skipped = [row.values["skipped"] for row in rows]
    assert skipped[-3:] == [1, 1, 1] and 0 in skipped and math.isnan(rows[-1].values["loss"])
    last = max(int(path.name[-6:]) for path in (folder / "diverged" / "checkpoints").glob("step-*"))
    assert f"the last good checkpoint is {folder / 'diverged' / 'checkpoints' / f'step-{last:06d}'}" in done.output
    report = json.loads((folder / "diverged" / "reconcile.json").read_text())
    assert report["ok"] and report["nonfinite"]["train/loss"] >= 3, "NaN is stored, counted and in W&B"
    status = json.loads((folder / "diverged" / "status.json").read_text())
    assert status["status"] == "failed" and status["reason"].startswith("Diverged: ")
