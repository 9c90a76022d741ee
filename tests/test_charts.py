import math
import subprocess
import sys

import pytest
from matplotlib.image import imread

from eagle3.charts import MAX_POINTS, _span_means, draw
from eagle3.runlog.ledger import Declared, Ledger


def write_run(folder, *, name="quickstart", ttt_steps=3, steps=40, val_every=10, nan_at=None):
    """A ledger as training writes it, with curves that only depend on the arguments."""
    by_step = frozenset(f"{stem}_{k}" for stem in ("loss", "acc") for k in range(ttt_steps))
    declared = {
        "train": Declared(by_step | {"loss", "lr"}),
        "val": Declared(by_step | {"loss", "accept_len"}),
    }
    ledger = Ledger(folder / "metrics.jsonl", declared, run=name)
    for step in range(1, steps + 1):
        done = 1 - math.exp(-3 * step / steps)
        values = {f"loss_{k}": 9 - (4 - k / 2) * done for k in range(ttt_steps)}
        values |= {f"acc_{k}": (0.5 - k / 10) * done for k in range(ttt_steps)}
        values["loss"] = math.nan if step == nan_at else sum(values[f"loss_{k}"] for k in range(ttt_steps))
        if step == nan_at and ttt_steps:
            values["loss_0"] = math.nan
        ledger.emit("train", step, values | {"lr": 1e-3 * (1 - step / steps)})
        if val_every and step % val_every == 0:
            ledger.emit("val", step, values | {"accept_len": 1 + done - (step / steps) ** 4})
    ledger.close()
    return folder


def comments(path):
    """The texts of an SVG: its glyphs are paths, but matplotlib keeps each text as a comment."""
    return [part.split(" -->")[0] for part in path.read_text().split("<!-- ")[1:]]


def test_one_run_has_every_panel_and_one_legend_entry_per_ttt_step(tmp_path):
    png, svg = draw([write_run(tmp_path / "run")], tmp_path / "out" / "made")
    assert (png.name, svg.name) == ("curves.png", "curves.svg")
    said = comments(svg)
    for text in (
        "quickstart",
        "Loss by TTT step",
        "Accuracy by TTT step",
        "Acceptance length (validation)",
        "Learning rate",
        "cross-entropy [nats]",
        "tokens per verifier call",
        "train",
        "validation",
    ):
        assert said.count(text) == 1, text
    assert [text for text in said if text.startswith("TTT step")] == [
        "TTT step 0",
        "TTT step 1",
        "TTT step 2",
    ]
    assert said.count("optimizer step") == 4
    assert any(text.startswith("best 1.") for text in said)
    assert "not recorded" not in said and "NaN or inf" not in said
    height, width, _ = imread(png).shape
    assert width >= 1200 and height >= 800


def test_the_same_ledger_gives_the_same_bytes_in_another_process(tmp_path):
    run = write_run(tmp_path / "run")
    here = draw([run], tmp_path / "a")
    command = [sys.executable, "-m", "eagle3.charts", str(run), "--out", str(tmp_path / "b")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(tmp_path / "b" / path.name) for path in here]
    for path in here:
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_several_runs_share_one_picture_and_one_legend(tmp_path):
    runs = [write_run(tmp_path / str(i), name=f"optimizer.lr={lr}") for i, lr in enumerate(("3e-4", "1e-3"))]
    _, svg = draw(runs, tmp_path / "out")
    assert svg.name == "compare.svg"
    said = comments(svg)
    assert said.count("optimizer.lr=3e-4") == said.count("optimizer.lr=1e-3") == 1
    assert [text for text in said if text.startswith("Accuracy")] == [f"Accuracy at TTT step {k}" for k in range(3)]


def test_runs_of_one_name_are_told_apart_by_their_directory(tmp_path):
    _, svg = draw([write_run(tmp_path / "a"), write_run(tmp_path / "b")], tmp_path)
    assert {"quickstart (a)", "quickstart (b)"} <= set(comments(svg))


def test_seven_steps_and_unequal_runs_can_be_drawn(tmp_path):
    runs = [
        write_run(tmp_path / "a", name="a", ttt_steps=7),
        write_run(tmp_path / "b", name="b", ttt_steps=2),
    ]
    _, svg = draw(runs, tmp_path)
    assert "Accuracy at TTT step 6" in comments(svg)
    draw(runs[:1], tmp_path)


def test_a_nan_is_shown_and_explained_not_hidden(tmp_path):
    _, svg = draw([write_run(tmp_path / "run", nan_at=7)], tmp_path)
    assert "NaN or inf" in comments(svg)


def test_a_run_without_validation_says_so(tmp_path):
    _, svg = draw([write_run(tmp_path / "run", val_every=0)], tmp_path)
    assert comments(svg).count("not recorded") == 1


def test_a_run_of_a_single_step_can_be_drawn(tmp_path):
    draw([write_run(tmp_path / "run", steps=1, val_every=1)], tmp_path)


def test_long_train_curves_are_means_and_the_legend_says_of_how_many(tmp_path):
    _, svg = draw([write_run(tmp_path / "run", steps=4 * MAX_POINTS, val_every=200)], tmp_path)
    assert "train (mean of 4 steps)" in comments(svg)
    nan = math.nan
    middles, means = _span_means([1, 2, 3, 4, 5], [1.0, 3.0, nan, 5.0, nan], 2)
    assert middles == [1.5, 3.5, 5.0] and means[:2] == [2.0, 5.0] and math.isnan(means[2])


@pytest.mark.parametrize("state", ["absent", "empty"])
def test_a_directory_without_rows_is_named(tmp_path, state):
    if state == "empty":
        (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match=str(tmp_path)):
        draw([tmp_path], tmp_path)
    command = [sys.executable, "-m", "eagle3.charts", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and str(tmp_path) in done.stderr and "Traceback" not in done.stderr
