"""Learning curves from ledgers, PNG and SVG: one run by TTT step, or several runs side by side.

    python -m eagle3.charts RUN_DIR... [--out DIR]

The same ledgers give the same bytes: no dates, no random ids.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich.console import Console

from eagle3.best import best_validation, quality_of
from eagle3.compare import names_of, read_job
from eagle3.runlog.ledger import Row, metric_names, read_ledger, series

Color = tuple[float, float, float, float] | str

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "eagle3",
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.titlesize": 12.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "axes.edgecolor": "#888888",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
}
RUN_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito
RUN_DASHES = ("-", "--", "-.", ":")
BEST_COLOR = "#b2182b"
MAX_MARKERS = 25
MAX_POINTS = 300  # a longer train curve is drawn as means of equal spans, and says so


@dataclass(frozen=True)
class Run:
    """What is drawn of one run directory."""

    label: str
    rows: list[Row]

    def names(self) -> list[str]:
        return metric_names(self.rows)


def draw(run_dirs: Sequence[Path], out_dir: Path) -> list[Path]:
    """Draws `curves.png` and `.svg` for one run, `compare.png` and `.svg` for several; returns their paths.

    Raises ValueError for a directory without a ledger, or a ledger without a row.
    """
    runs = _read(run_dirs)
    with mpl.rc_context(STYLE):
        figure = _one_run(runs[0]) if len(runs) == 1 else _several_runs(runs)
        out_dir.mkdir(parents=True, exist_ok=True)
        stem = out_dir / ("curves" if len(runs) == 1 else "compare")
        figure.savefig(stem.with_suffix(".png"), dpi=150, metadata={"Software": None})
        figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
    return [stem.with_suffix(".png"), stem.with_suffix(".svg")]


def _read(run_dirs: Sequence[Path]) -> list[Run]:
    if not run_dirs:
        raise ValueError("no run directory to draw")
    ledgers = [read_ledger(path) for path in run_dirs]
    for path, rows in zip(run_dirs, ledgers, strict=True):
        if not rows:
            raise ValueError(f"{path.absolute()} has a ledger without a row: nothing was trained there")
    labels = [rows[0].run for rows in ledgers]
    if len(run_dirs) > 1:
        apart = names_of([read_job(path) for path in run_dirs])
        labels = [short or label for short, label in zip(apart, labels, strict=True)]
    if len(set(labels)) < len(labels):
        labels = [f"{label} ({path.name})" for label, path in zip(labels, run_dirs, strict=True)]
    return [Run(label, rows) for label, rows in zip(labels, ledgers, strict=True)]


def _one_run(run: Run) -> Figure:
    figure = _figure(11.0, 8.0)
    (loss, accuracy), (length, rate) = figure.subplots(2, 2)
    steps = _ttt_steps([run])
    colors: list[Color] = [mpl.colormaps["viridis"](0.05 + 0.8 * k / max(1, len(steps) - 1)) for k in steps]
    for k, color in zip(steps, colors, strict=True):
        _curve(loss, run, f"loss_{k}", color)
        _curve(accuracy, run, f"acc_{k}", color)
    if not steps:
        _curve(loss, run, "loss", RUN_COLORS[0])
    _curve(length, run, "accept_len", RUN_COLORS[0])
    _mark_best(length, [run])
    _curve(rate, run, "lr", "#444444", exact=True)
    _label_panels(loss, accuracy, length, rate)
    entries = [_entry(f"TTT step {k}", color) for k, color in zip(steps, colors, strict=True)]
    _finish(figure, run.label, entries + _common_entries([run]))
    return figure


def _several_runs(runs: Sequence[Run]) -> Figure:
    steps = _ttt_steps(runs)
    lines = 1 + math.ceil(len(steps) / 3)
    figure = _figure(13.0, 3.7 * lines + 0.9)
    panels = figure.subplots(lines, 3, squeeze=False)
    length, loss, rate = panels[0]
    by_step = list(panels[1:].flat)
    entries = []
    for i, run in enumerate(runs):
        color, dash = RUN_COLORS[i % len(RUN_COLORS)], RUN_DASHES[i // len(RUN_COLORS) % len(RUN_DASHES)]
        _curve(length, run, "accept_len", color, dash=dash)
        _curve(loss, run, "loss", color, dash=dash)
        _curve(rate, run, "lr", color, dash=dash, exact=True)
        for k, axes in zip(steps, by_step, strict=False):
            _curve(axes, run, f"acc_{k}", color, dash=dash)
        entries.append(_entry(run.label, color, dash))
    _label_panels(loss, None, length, rate)
    loss.set_title("Loss, all TTT steps")
    for k, axes in zip(steps, by_step, strict=False):
        _panel(axes, f"Accuracy at TTT step {k}", "", PercentFormatter(1.0, decimals=0))
        axes.sharey(by_step[0])
    _mark_best(length, runs)
    for axes in by_step[len(steps) :]:
        axes.set_visible(False)
    _finish(figure, f"{len(runs)} runs", entries + _common_entries(runs))
    return figure


def _figure(width: float, height: float) -> Figure:
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, hspace=0.04, wspace=0.04)
    figure = Figure(figsize=(width, height), layout=layout)  # no pyplot: nothing global, no display
    FigureCanvasAgg(figure)
    return figure


def _ttt_steps(runs: Sequence[Run]) -> list[int]:
    names = {name for run in runs for name in run.names()}
    found = {
        int(suffix)
        for name in names
        for stem, _, suffix in [name.split("/", 1)[1].rpartition("_")]
        if stem in ("loss", "acc") and suffix.isdigit()
    }
    return sorted(found)


def _curve(axes: Axes, run: Run, name: str, color: Color, *, dash: str = "-", exact: bool = False) -> None:
    """Train as a thin line, validation thick and marked, both in one colour; NaN and inf as crosses below.

    `exact` is for what has no noise: every value, and a thicker line.
    """
    if f"train/{name}" in run.names():
        steps, values = series(run.rows, f"train/{name}")
        alpha = 0.45 if f"val/{name}" in run.names() else 0.9
        points = (steps, values) if exact else _span_means(steps, values, _span(run))
        axes.plot(*points, color=color, lw=1.8 if exact else 1.0, ls=dash, alpha=alpha, zorder=2)
        _mark_nonfinite(axes, steps, values, color)
    if f"val/{name}" in run.names():
        steps, values = series(run.rows, f"val/{name}")
        every = max(1, math.ceil(len(steps) / MAX_MARKERS))
        style: dict[str, Any] = {"marker": "o", "ms": 5.5, "mec": "white", "mew": 0.8, "markevery": every}
        axes.plot(steps, values, color=color, lw=1.8, ls=dash, zorder=3, **style)
        _mark_nonfinite(axes, steps, values, color)


def _span(run: Run) -> int:
    """Over how many train rows one drawn point is the mean."""
    return max(1, math.ceil(sum(row.split == "train" for row in run.rows) / MAX_POINTS))


def _span_means(steps: Sequence[int], values: Sequence[float], span: int) -> tuple[list[float], list[float]]:
    """Means of `span` rows each, over the finite values; NaN where there is none."""
    if span == 1:
        return list(steps), list(values)
    middles, means = [], []
    for start in range(0, len(steps), span):
        finite = [value for value in values[start : start + span] if math.isfinite(value)]
        middles.append(sum(steps[start : start + span]) / len(steps[start : start + span]))
        means.append(sum(finite) / len(finite) if finite else math.nan)
    return middles, means


def _mark_nonfinite(axes: Axes, steps: Sequence[int], values: Sequence[float], color: Color) -> None:
    bad = [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
    if bad:
        low = axes.get_xaxis_transform()
        axes.plot(bad, [0.03] * len(bad), "x", color=color, ms=6, mew=1.6, transform=low, clip_on=False)


def _mark_best(axes: Axes, runs: Sequence[Run]) -> None:
    """A star at the best validation of all."""
    found = [best for run in runs if (best := best_validation(run.rows))]
    if not found:
        return
    best = max(found, key=quality_of)
    value, step = best.values["accept_len"], best.step
    axes.plot([step], [value], marker="*", ms=15, color=BEST_COLOR, mec="white", zorder=4)
    axes.margins(y=0.16)
    last = max(row.step for run in runs for row in run.rows if row.split == "val")
    right = step > last / 2
    text: dict[str, Any] = {
        "ha": "right" if right else "left",
        "va": "bottom",
        "color": BEST_COLOR,
        "fontweight": "bold",
    }
    offset = (-9 if right else 9, 5)
    axes.annotate(f"best {value:.2f} at step {step}", (step, value), offset, textcoords="offset points", **text)


def _label_panels(loss: Axes, accuracy: Axes | None, length: Axes, rate: Axes) -> None:
    _panel(loss, "Loss by TTT step", "cross-entropy [nats]")
    if accuracy is not None:
        _panel(accuracy, "Accuracy by TTT step", "drafts that are right", PercentFormatter(1.0, decimals=0))
    _panel(length, "Acceptance length (validation)", "tokens per verifier call")
    _panel(rate, "Learning rate", "", lambda value, _: f"{value:g}")
    rate.set_ylim(bottom=0)


def _panel(axes: Axes, title: str, unit: str, ticks: Callable | None = None) -> None:
    axes.set_title(title)
    axes.set_ylabel(unit)
    axes.set_xlabel("optimizer step")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if ticks is not None:
        axes.yaxis.set_major_formatter(ticks)
    if not axes.lines:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color="#888888")


def _common_entries(runs: Sequence[Run]) -> list[Line2D]:
    """What thin lines, markers and crosses mean."""
    span = max(_span(run) for run in runs)
    train = "train" if span == 1 else f"train (mean of {span} steps)"
    entries = [
        Line2D([], [], color="#444444", lw=1.0, alpha=0.7, label=train),
        Line2D([], [], color="#444444", lw=1.6, marker="o", ms=5, mec="white", label="validation"),
    ]
    if any(not math.isfinite(value) for run in runs for row in run.rows for value in row.values.values()):
        entries.append(Line2D([], [], color="#444444", lw=0, marker="x", mew=1.6, label="NaN or inf"))
    return entries


def _entry(label: str, color: Color, dash: str = "-") -> Line2D:
    return Line2D([], [], color=color, lw=4 if dash == "-" else 2.5, ls=dash, label=label)


def _finish(figure: Figure, title: str, entries: Sequence[Line2D]) -> None:
    figure.suptitle(title, fontsize=14, fontweight="bold")
    widest = max(len(str(entry.get_label())) for entry in entries)
    columns = min(len(entries), max(2, int(figure.get_figwidth() * 10 / (widest + 7))))
    figure.legend(handles=list(entries), loc="outside lower center", ncols=columns)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m eagle3.charts", description=__doc__.splitlines()[0])
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, help="default: RUN_DIR/charts for one run, ./charts for several")
    given = parser.parse_args()
    default = given.run_dirs[0] / "charts" if len(given.run_dirs) == 1 else Path("charts")
    try:
        paths = draw(given.run_dirs, given.out or default)
    except ValueError as err:
        parser.exit(2, f"error: {err}\n")
    for path in paths:
        Console().print(str(path), highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
