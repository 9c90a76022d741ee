"""What every script does around its stages: output that appears at once, the machine's settings, errors for people."""

import logging
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from rich import get_console
from rich.console import Console
from rich.text import Text

from eagle3.compare import saved_overrides
from eagle3.config import Config, as_dict, typed
from eagle3.naming import IDENTITY
from eagle3.runlog import Declared, RunLog, SilentRunLog, git_diff, open_runlog, provenance
from eagle3.sweep import require_unchanged, varied_keys
from eagle3.traces import clear_traces
from extract.config import Hardware
from extract.engines import EngineError
from extract.progress import shown_path
from extract.rundir import RunDir, join_run, open_run
from extract.store_space import FULL

log = logging.getLogger(__name__)

Stage = Callable[[Config, Path], float | None]
AGAIN = ("resume=", "from_run=")

STAGE_FIGURES = {
    "stage": Declared(
        names=frozenset({"done", "tokens", "reused", "seconds", "start_s"}),
        optional=frozenset({"tokens_per_s"}),
        integer=frozenset({"done", "tokens", "reused"}),
    )
}
"""What a script of several stages reports: one row a stage."""


def emit_stages(runlog: RunLog | SilentRunLog, stages: Sequence[Mapping[str, float]]) -> None:
    runlog.expect("stage", len(stages))
    for number, figures in enumerate(stages, start=1):
        runlog.emit("stage", number, figures)


def launch(raw: DictConfig, stage: Stage) -> float | None:
    """Run a stage on a composed config, in Hydra's output directory; its return value is the sweep's objective.

    A ValueError, a full disk and an engine that gave up are the user's to mend: they are shown without a traceback,
    which lies in the run directory. In a sweep they are raised, so that the other jobs go on and Hydra knows of them.
    """
    hydra = HydraConfig.get()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    errors = Console(stderr=True) if rank() > 0 else get_console()
    if rank() > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - rank 0 speaks for all, until the process ends
        get_console().quiet = True
    try:
        config = typed(raw, hydra.runtime.choices)
        earlier = earlier_run_of(config, hydra.job.config_name)
        if is_sweep():
            require_unchanged(Path(hydra.sweep.dir), hydra)
        # Else the settings that count are those saved there; and serve.py computes nothing here.
        if earlier is None and hydra.job.config_name != "serve":
            prepare_machine(config.hardware, plans=config.dry_run)
        return stage(config, Path(hydra.runtime.output_dir))
    except KeyboardInterrupt:
        errors.print(Text(f"{hydra.job.name}: interrupted; the same command goes on from here", style="red"))
        raise SystemExit(130) from None
    except (ValueError, EngineError, OSError) as error:
        full = isinstance(error, OSError) and error.errno in FULL
        if is_sweep() or (isinstance(error, OSError) and not full):
            raise
        remedy = "; nothing finished is lost: make room and run the same command again" if full else ""
        errors.print(Text(f"{hydra.job.name}: {error}{remedy}", style="red"), soft_wrap=True)
        trace = Path(hydra.runtime.output_dir) / "traceback.txt"
        if trace.exists():
            errors.print(Text(f"traceback: {trace}", style="dim"), soft_wrap=True)
        raise SystemExit(1) from None
    finally:
        if rank() == 0 and not is_sweep():  # a sweep's table reads the overrides of jobs that were refused
            clear_traces(Path(hydra.runtime.output_dir), hydra.job.name)


def earlier_run_of(config: Config, script: str | None) -> str | None:
    """The run that is to be resumed or repeated. Raises ValueError if this script does neither, or both are told."""
    told = [key for key in ("resume", "from_run") if getattr(config, key) is not None]
    if told and (script != "train" or len(told) == 2):
        raise ValueError(
            f"{' and '.join(told)}: train.py takes one of them; extract.py and evaluate.py go on by themselves"
        )
    return config.resume or config.from_run


def prepare_machine(hardware: Hardware, *, plans: bool) -> None:
    """Environment, threads and messages, before the first use of the device; ValueError if it is not there.

    Whoever only `plans` needs no device: a job for eight GPUs can be looked at on a laptop.
    """
    _require_processes(hardware.devices if HydraConfig.get().job.config_name == "train" else 1)
    os.environ.update(hardware.env)
    if hardware.threads is not None:
        torch.set_num_threads(hardware.threads)
    if hardware.accelerator == "cuda" and not plans and not torch.cuda.is_available():
        raise ValueError("hardware.accelerator=cuda, but torch sees no GPU here; use hardware=cpu")
    torch.set_float32_matmul_precision("high")  # TF32 where there is such a thing; a CPU computes as before
    for noisy in ("pytorch_lightning", "pytorch_lightning.utilities.rank_zero"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    warnings.filterwarnings("ignore", category=UserWarning, module="lightning_utilities")


def _require_processes(used: int) -> None:
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started not in (1, used):
        raise ValueError(f"WORLD_SIZE={started} processes were started and {used} is used here; set hardware.devices")
    if is_sweep() and used > 1:
        raise ValueError("a sweep (-m) trains on one device a job; set hardware.devices=1 or launch single runs")


@contextmanager
def tracked_run(
    config: Config, path: Path, stage: str, inputs: dict[str, str], *, intact: bool = True, renews: bool = False
) -> Iterator[RunDir]:
    """The stage's run directory for one attempt; see `extract.rundir.open_run`. Rank 0 owns it, the others join."""
    if rank() > 0:
        yield join_run(path)
        return
    told = as_dict(config)
    # Hydra writes its own list of overrides before this run can be refused, over that of the run which lies there.
    attempt = provenance() | {"overrides": task_overrides()}
    with open_run(path, stage, told, inputs, attempt, intact=intact, renews=renews,
                  depends_on=IDENTITY[stage]) as run:  # fmt: skip
        if run.state != "finished" and (changes := git_diff()):
            (run.path / f"source-{run.attempt}.diff").write_text(changes)  # with the commit, the code that ran
        yield run


def run_log(
    config: Config,
    run: RunDir,
    stage: str,
    declared: dict[str, Declared],
    *,
    resumed_from_step: int = 0,
) -> RunLog | SilentRunLog:
    """Ledger and mirrors of this attempt, named so that runs can be told apart and compared in W&B."""
    hydra = HydraConfig.get()
    overrides = [o for o in _overrides() if not o.startswith(("experiment=", "tracking"))]
    if is_sweep() and (varied := varied_keys(Path(hydra.sweep.dir))):
        overrides = [o for o in overrides if o.partition("=")[0] in varied]  # a name has no room for what is the same
    group = Path(hydra.sweep.dir).name if is_sweep() else config.name
    tracking = config.tracking
    return open_runlog(
        run.path,
        declared,
        mode=tracking.mode,
        project=tracking.project,
        entity=tracking.entity,
        group=group,
        name=_run_name(overrides) or run.path.name,
        job_type=stage,
        tags=[*tracking.tags, config.name, config.verifier.name],
        config=as_dict(config) | {"inputs": dict(run.inputs)},
        csv=tracking.csv,
        tensorboard=tracking.tensorboard,
        attempt=run.attempt,
        resumed_from_step=resumed_from_step if run.attempt > 1 else None,
        rank=rank(),
    )


def rank() -> int:
    """This process among those of one training; the launcher (Lightning's own, or torchrun) says so."""
    told = (os.environ[name] for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ)
    return int(next(told, "0"))


def is_sweep() -> bool:
    return HydraConfig.get().mode == RunMode.MULTIRUN


def task_overrides() -> list[str]:
    """What the command line sets of the config, as it was typed."""
    return list(HydraConfig.get().overrides.task)


def command(script: str, *keys: str) -> str:
    """The command line for the next stage of this very config, with what the user overrode."""
    said = {key.split("=")[0] for key in (*keys, "dry_run=true")}
    overrides = [o for o in _overrides() if o.split("=")[0] not in said]
    executable = Path(sys.executable)
    own = executable.is_relative_to(Path.cwd()) and "VIRTUAL_ENV" not in os.environ
    return " ".join([str(executable.relative_to(Path.cwd())) if own else "python", script,
                     *map(shlex.quote, (*overrides, *keys))])  # fmt: skip


def drafter_key(config: Config, drafter: Path) -> list[str]:
    """The key that evaluate.py needs where a drafter does not lie where its config says: a sweep, a directory given."""
    told = config.drafter_dir
    return [] if told and drafter.absolute() == Path(told).absolute() else [f"drafter_dir={shown_path(drafter)}"]


def _overrides() -> list[str]:
    """What the user set; of a run that is resumed or repeated, what was set when it began."""
    told = task_overrides()
    earlier = [o.partition("=")[2].strip("'\"") for o in told if o.startswith(AGAIN)]
    if earlier:
        told = saved_overrides(Path(earlier[0]))
    return [o for o in told if not o.startswith(AGAIN)]


def _run_name(overrides: Sequence[str]) -> str:
    """lr=3e-4,epochs=2: the last part of each key, and of each path; W&B takes 128 characters."""
    short = [
        f"{key.split('.')[-1]}={value.rstrip('/').split('/')[-1]}"
        for key, _, value in (o.partition("=") for o in overrides)
    ]
    return ",".join(short)[:128]
