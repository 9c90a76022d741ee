"""The W&B mirror. Imported only where W&B is asked for: `tracking=local` needs neither the package nor its start-up."""

import netrc
import os
import secrets
import time
from pathlib import Path
from urllib.parse import urlparse

import httpx
import wandb

from eagle3.runlog.ledger import Row
from eagle3.runlog.mirrors import Held, Mirror, writable_dir
from eagle3.runlog.shown import Shown
from eagle3.runlog.wandb_log import WandbHistory, read_wandb

FLUSH_EVERY_S = 1.0
"""How often W&B writes what it was given to its transaction log; its own 15 s are much to lose by kill -9."""
SETTLE_TIMEOUT_S = 30.0
EXIT_RECORD_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 600.0
OURS = ("step", "attempt")
"""Beside the metrics of a row: what its charts stand on, and which attempt logged it."""


class WandbMirror(Mirror):
    """One W&B run, held by its own handle: two jobs of a sweep in one process are two finished runs.

    Rows carry our step as a value, never as `step=`, which W&B drops when it falls (wandb issues 9449, 5913).
    """

    name = "wandb"
    patience_s = SETTLE_TIMEOUT_S + FINISH_TIMEOUT_S + EXIT_RECORD_TIMEOUT_S

    def __init__(self, directory: Path, shown: Shown) -> None:
        assert shown.mode != "local"
        settings = wandb.Settings(
            silent=True,
            console="off",
            finish_timeout=FINISH_TIMEOUT_S,
            finish_timeout_raises=True,
            x_transaction_log_flush_interval=FLUSH_EVERY_S,
        )
        try:
            self.run = wandb.init(
                id=secrets.token_hex(4),  # said here, or WANDB_RUN_ID would make one run of a whole sweep
                reinit="create_new",
                mode=shown.mode,
                dir=str(writable_dir(directory)),
                project=shown.project,
                entity=shown.entity,
                group=shown.group,
                name=shown.name,
                job_type=shown.job_type,
                tags=shown.tags,
                config=dict(shown.config),
                settings=settings,
            )
        except wandb.Error as err:
            raise ValueError(
                f"W&B cannot start in mode {shown.mode}: {err}; tracking=offline needs no network"
            ) from err
        self.offline = shown.mode == "offline"
        self.log_file = Path(self.run.settings.sync_file).absolute()
        if not self.log_file.is_relative_to(directory.absolute()):
            self.run.finish(exit_code=1)
            raise ValueError(f"W&B writes to {self.log_file}, not below {directory.absolute()}; check WANDB_DIR")
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def where(self) -> str | None:
        """The link of an online run, or the command that uploads an offline one."""
        if self.offline:  # asking an offline run for its link prints a warning
            return f"wandb sync {os.path.relpath(self.log_file.parent)}"
        return self.run.url

    def emit(self, row: Row) -> None:
        self.run.log({"step": row.step, "attempt": row.attempt, **row.flat()})

    def attach(self, kind: str, path: Path) -> None:
        """Uploads a directory as an artifact; of an offline run `wandb sync` does, so it must stay where it is."""
        artifact = wandb.Artifact(f"{path.name}-{self.run.id}", type=kind)
        artifact.add_dir(str(path.resolve()), policy="immutable")  # or a second copy would be kept under $HOME
        self.run.log_artifact(artifact)

    def settle(self, want: Held) -> None:
        """A finished run cannot be marked as failed any more, so the log is read while it is open."""
        deadline, size = time.monotonic() + SETTLE_TIMEOUT_S, -1
        while True:
            size, before = self.log_file.stat().st_size, size
            if size != before and _held(read_wandb(self.log_file)) == want:
                return
            if time.monotonic() >= deadline:
                raise RuntimeError(f"{self.log_file} lacks rows, {SETTLE_TIMEOUT_S:.0f} s after the last one")
            time.sleep(0.1)

    def close(self, ok: bool) -> None:
        self.run.finish(exit_code=0 if ok else 1)

    def held(self) -> Held:
        history = read_wandb(self.log_file, timeout_s=EXIT_RECORD_TIMEOUT_S)
        if history.exit_code is None:
            raise RuntimeError(f"{self.log_file} has no exit record after {EXIT_RECORD_TIMEOUT_S:.0f} s")
        return _held(history)


def _held(history: WandbHistory) -> Held:
    held = Held()
    for row in history.rows:
        names = [name for name in row if name not in OURS]
        held[names[0].split("/", 1)[0] if names else "", int(row["step"]), len(names)] += 1
    return held


def check_online(timeout_s: float = 10.0) -> None:
    """Raises ValueError if there is no key for the W&B server, or no server that answers."""
    base_url = wandb.setup().settings.base_url  # environment and settings files included
    host = urlparse(base_url).hostname or base_url
    if not (os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or _netrc_has(host)):
        raise ValueError(f"tracking=online finds no W&B key for {host}: run `wandb login`, or use tracking=offline")
    try:
        httpx.get(base_url, timeout=timeout_s)
    except httpx.HTTPError as err:
        raise ValueError(f"tracking=online cannot reach {base_url} ({err}); use tracking=offline") from err


def _netrc_has(host: str) -> bool:
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return path.exists() and netrc.netrc(path).authenticators(host) is not None
    except netrc.NetrcParseError as err:
        raise ValueError(f"{path} cannot be read: {err}") from err
