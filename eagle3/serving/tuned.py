"""The best setting of a tuning sweep as a file of conf/server/, to be chosen by its name.

python -m eagle3.serving.tuned SWEEP_DIR --best single|load --name NAME     conf/server/NAME.yaml
python -m eagle3.serving.tuned SWEEP_DIR --job NUMBER --name NAME           that of one job
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from rich import get_console
from rich.text import Text

from eagle3.runlog.provenance import SOURCE_ROOT
from eagle3.serving.report import gain
from eagle3.serving.tuning import BASELINE, GOALS, Trial, best_of, read_trials
from extract.durable import replace_file
from extract.progress import shown_path
from extract.rundir import saved_run

SERVERS = SOURCE_ROOT / "conf" / "server"


def tuned_yaml(trial: Trial, trials: Sequence[Trial]) -> str:
    """The file: the server it was, what was set of it, and where that comes from.

    Raises:
        ValueError: the job varied the engine's own group in a way that a file cannot say.
    """
    server = saved_run(trial.job.directory)["config"]["server"]
    choices = yaml.safe_load((trial.job.directory / ".hydra" / "hydra.yaml").read_text())["hydra"]["runtime"]["choices"]
    own: dict[str, Any] = {}
    beside = []
    for override in OverridesParser.create().parse_overrides(list(trial.job.overrides)):
        key = override.key_or_group.replace("/", ".")
        if key.startswith("server."):
            _put(own, key.split(".")[1:], _value(server, key.split(".")[1:]))
        elif key not in ("server", "name") and not key.startswith(("tracking", "serving", "hydra")):
            beside.append(override.input_line or key)
    where = f"hardware={choices['hardware']}, verifier={choices['verifier']}"
    head = [f"# Tuned by serve.py -m on {where}: {_figures(trial, trials)}"]
    head += [f"# Measured with {word}" for word in beside]
    body = yaml.safe_dump(own, sort_keys=False, default_flow_style=False) if own else ""
    return "\n".join([*head, "defaults:", f"  - {choices['server']}", "  - _self_", "", body])


def _figures(trial: Trial, trials: Sequence[Trial]) -> str:
    base = next((t for t in trials if t.name == BASELINE and t.summary), None)
    names = (("single stream", GOALS["single"]), (f"{trial.summary['concurrency']} at once", GOALS["load"]))
    if base is None:
        return ", ".join(f"{what} {trial.summary[name]:.1f}" for what, name in names) + " tokens/s"
    return ", ".join(f"{what} {gain(base.summary[name], trial.summary[name])}" for what, name in names) + " tokens/s"


def _value(server: dict[str, Any], path: Sequence[str]) -> Any:
    """What the job ran with; null for what was taken away, which leaves a flag out."""
    found: Any = server
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def choose(trials: Sequence[Trial], goal: str | None, job: str | None) -> Trial:
    """ValueError if there is no such job, or it has no figures, or the best is the untuned server."""
    if job is not None:
        found = next((t for t in trials if t.name == job), None)
        if found is None or not found.summary:
            raise ValueError(f"--job {job}: there is no such job with figures; there are {_names(trials)}")
        return found
    assert goal is not None
    best = best_of(trials, goal)
    if best is None or best.name == BASELINE:
        raise ValueError(
            f"--best {goal}: no setting is better than the untuned server; --job takes any of {_names(trials)}"
        )
    return best


def _names(trials: Sequence[Trial]) -> str:
    return ", ".join(t.name for t in trials if t.summary) or "none"


def write_tuned(sweep_dir: Path, goal: str | None, job: str | None, name: str, folder: Path) -> Path:
    """Writes `folder`/`name`.yaml. ValueError if there is one already, or nothing to write."""
    if not re.fullmatch(r"[a-z]\w*", name):
        raise ValueError(f"--name {name}: use small letters, digits and _")
    trials = read_trials(sweep_dir)
    text = tuned_yaml(choose(trials, goal, job), trials)
    file = folder / f"{name}.yaml"
    if file.exists():
        raise ValueError(f"{file} is there already; choose another name, or remove it")
    replace_file(file, text.encode())
    return file


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m eagle3.serving.tuned", description="Writes a tuned server's config."
    )
    parser.add_argument("sweep_dir", type=Path, metavar="SWEEP_DIR", help="of serve.py -m")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--best", choices=GOALS, help="fastest alone, or at the highest concurrency")
    which.add_argument("--job", help="number of a job")
    parser.add_argument("--name", required=True, help="server=NAME chooses it then")
    parser.add_argument("--out", type=Path, default=SERVERS, help="folder of the file; by default conf/server")
    asked = parser.parse_args()
    try:
        file = write_tuned(asked.sweep_dir, asked.best, asked.job, asked.name, asked.out)
    except (OSError, ValueError) as error:
        parser.exit(2, f"error: {error}\n")
    get_console().print(Text(f"{shown_path(file)}\nnext: python serve.py server={file.stem}"), soft_wrap=True)


if __name__ == "__main__":
    main()
