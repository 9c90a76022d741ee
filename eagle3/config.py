"""Typed settings of the drafter's side, the root of all scripts, and the one conversion from Hydra's config.

All scripts share one root, so that an experiment describes a whole pipeline and evaluate.py finds what train.py of
the same config has trained. `typed()` is the first statement of every script; nothing below it knows omegaconf.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

import eagle3.naming  # the names of directories in conf/ are resolved there
import eagle3.open_keys  # noqa: F401 - and sections there that take any key
from extract.config import (
    STRICT,
    Extraction,
    Float,
    Hardware,
    Int,
    NonEmpty,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Server,
    Share,
    Verifier,
)


@dataclass(frozen=True, config=STRICT)
class Drafter:
    ttt_steps: Annotated[Int, Field(ge=1, le=16)]
    """K, draft steps unrolled in training (training-time test)."""
    step_decay: Share
    """Weight of step k in the loss is step_decay ** k."""
    noise_std: NonNegativeFloat
    """Uniform noise in (-noise_std, noise_std) added to the captured states in training; 0 draws none."""
    draft_vocab_size: PositiveInt
    """D, tokens that can be drafted; the verifier's vocabulary size makes every token draftable."""
    loss: Literal["soft_ce", "lk_alpha", "lk_lambda", "tv"]
    """Of a draft, alpha being the chance that sampling accepts it. soft_ce: cross-entropy against the verifier's
    distribution over the draft vocabulary; tv: 1 - alpha; lk_alpha: -log alpha; lk_lambda: from soft_ce to tv as alpha
    rises. Formulas: eagle3/row_losses.py."""
    fc_norm: bool
    """EAGLE-3.1: an RMSNorm for each captured layer before they are fused."""
    norm_output: bool
    """EAGLE-3.1: the next step is fed the normed state."""
    intermediate_size: PositiveInt | None
    """Width of the MLP; null is the verifier's."""
    num_heads: PositiveInt | None
    """Attention heads; null is the verifier's."""
    num_kv_heads: PositiveInt | None
    """Key and value heads; null is the verifier's."""
    head_dim: PositiveInt | None
    """Width of a head; null is the verifier's."""
    rope_parameters: dict[str, Any] | None
    """rope_type, rope_theta and scaling; null is the verifier's."""
    init_from: str | None
    """Drafter directory to start from (warm start). Its draft vocabulary stays."""


@dataclass(frozen=True, config=STRICT)
class Optimizer:
    lr: PositiveFloat
    """Peak learning rate of AdamW."""
    betas: Annotated[list[Annotated[Float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]
    """Of AdamW: decay of the running means of the gradient and of its square."""
    eps: PositiveFloat
    """Of AdamW: added to the root of the squared gradient's mean."""
    weight_decay: NonNegativeFloat
    """On matrices only, never on norms."""
    warmup_ratio: Annotated[Float, Field(ge=0, lt=1)]
    """Share of all optimizer steps in which the rate rises linearly."""
    floor_ratio: Annotated[Float, Field(ge=0, le=1)]
    """The cosine ends at lr * floor_ratio."""
    clip_norm: PositiveFloat
    """Global gradient norm above which gradients are scaled down."""
    max_nonfinite_steps: PositiveInt
    """So many optimizer steps in a row whose loss or gradient is not finite end the training; one alone is skipped."""
    epochs: PositiveInt
    """Passes over the training rows."""
    batch_tokens: PositiveInt
    """Tokens of packed rows in one optimizer step, over all devices and micro-batches."""


@dataclass(frozen=True, config=STRICT)
class Data:
    overlong: Literal["split", "cut"]
    """Samples longer than extraction.max_len: split into pieces, or cut to the first."""
    val_fraction: Annotated[Float, Field(gt=0, lt=1)]
    """Share of conversations held out for validation, at least one."""
    val_every_steps: PositiveInt | None
    """Validate, and save a checkpoint, every so many optimizer steps; null is once an epoch."""


@dataclass(frozen=True, config=STRICT)
class Evaluation:
    prompts: NonEmpty
    """Prompts that were not trained on, in any form that extraction.prompts takes."""
    limit: PositiveInt | None
    """Decode at most so many prompts; null is all."""
    max_new_tokens: Annotated[Int, Field(ge=2)]
    """Of each decoded answer; the first token of an answer is never drafted."""
    drafts: PositiveInt
    """Tokens drafted before each verification."""
    bootstrap: PositiveInt
    """Resamples of the prompts for the confidence interval."""


@dataclass(frozen=True, config=STRICT)
class Serving:
    mode: Literal["benchmark", "foreground", "capture"]
    """What serve.py starts a server for: to measure it and stop, to keep it until Ctrl-C, or to keep it for extractions
    on this machine (`server.urls`), which take hidden states from it."""
    host: NonEmpty
    """Address of a server in the foreground; 0.0.0.0 lets other machines in."""
    port: Annotated[Int, Field(gt=0, lt=65536)]
    """Its port. A benchmark takes any that is free, and 127.0.0.1."""
    prompts: NonEmpty
    """What a benchmark asks: first turns, in any form that extraction.prompts takes."""
    limit: PositiveInt | None
    """Read at most so many conversations; null is all."""
    new_tokens: Annotated[Int, Field(ge=2)]
    """Tokens of each answer; none ends earlier."""
    concurrencies: Annotated[list[PositiveInt], Field(min_length=1)]
    """Requests under way at once, rising; the throughput of each is measured."""
    requests_per_client: PositiveInt
    """Answers that each of them waits for, one after another, in one repeat."""
    single_requests: PositiveInt
    """Requests of one repeat of the single-stream figures."""
    prefill_tokens: Annotated[Int, Field(ge=2)]
    """Tokens of a long prompt, made of the prompts above."""
    prefill_requests: PositiveInt
    """Long prompts of one repeat."""
    warmup: Annotated[Int, Field(ge=0)]
    """Repeats of each figure that come first and do not count."""
    repeats: PositiveInt
    """Repeats that count: their median is the figure, their least and greatest the spread."""

    def __post_init__(self) -> None:
        if sorted(set(self.concurrencies)) != self.concurrencies:
            raise ValueError(f"serving.concurrencies={self.concurrencies} must rise, each once")


@dataclass(frozen=True, config=STRICT)
class Tracking:
    mode: Literal["offline", "online", "local"]
    """W&B: offline needs no account and no network, online needs WANDB_API_KEY, local writes no W&B run."""
    project: NonEmpty
    """W&B project."""
    entity: str | None
    """W&B user or team; null is the account's default."""
    tags: list[str]
    """W&B tags, beside the names of experiment and verifier."""
    tensorboard: bool
    """Mirror the metrics to TensorBoard files in the run directory."""
    csv: bool
    """Mirror the metrics to one CSV file a split in the run directory."""
    artifacts: bool
    """Keep charts and best drafter of a training as artifacts of its W&B run."""


@dataclass(frozen=True, config=STRICT)
class Config:
    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
    """Name of the experiment: of its store, its run directories and its W&B group."""
    hardware: Hardware
    verifier: Verifier
    server: Server
    extraction: Extraction
    drafter: Drafter
    optimizer: Optimizer
    data: Data
    evaluation: Evaluation
    serving: Serving
    tracking: Tracking
    store: NonEmpty
    """Directory of hidden states: written by extract.py, read by train.py."""
    drafter_dir: NonEmpty | None
    """Drafter that evaluate.py decodes with, by default the one that train.py makes of this very config; and serve.py,
    by default with none."""
    cache_dir: NonEmpty
    """Converted verifiers (a GGUF is dequantised once)."""
    seed: Annotated[Int, Field(ge=0)]
    """Of sampling, data order, noise, initial weights and bootstrap."""
    resume: str | None
    """Run directory of train.py to continue, with the config saved there."""
    from_run: str | None
    """Run directory of train.py to repeat from the beginning: its run.json is enough."""
    dry_run: bool
    """Check and plan, then stop before the first expensive step."""

    def __post_init__(self) -> None:
        if self.optimizer.batch_tokens % self.extraction.max_len:
            low = max(1, self.optimizer.batch_tokens // self.extraction.max_len) * self.extraction.max_len
            raise ValueError(
                f"optimizer.batch_tokens={self.optimizer.batch_tokens} is no multiple of "
                f"extraction.max_len={self.extraction.max_len}, the length of a packed row; use {low}"
            )
        if self.evaluation.max_new_tokens >= self.extraction.max_len:
            raise ValueError(
                f"evaluation.max_new_tokens={self.evaluation.max_new_tokens} leaves no room for a prompt in "
                f"extraction.max_len={self.extraction.max_len}"
            )


class ConfigError(ValueError):
    """Settings that cannot be used, each named with its key."""


def typed(raw: DictConfig, choices: Mapping[str, str] | None = None) -> Config:
    """Hydra's config as frozen dataclasses; `choices` are the options of its groups, for messages.

    Raises:
        ConfigError: naming every key that is unset, unresolvable, unknown, of the wrong type or out of range, or
            two settings that contradict each other.
    """
    problems: list[str] = []
    values = _plain(raw, "", problems, choices or {})
    if problems:
        raise ConfigError("\n".join(problems))
    return from_values(values)


def from_values(values: dict[str, Any]) -> Config:
    """Checked config from plain values, e.g. those that a run directory saved.

    Raises:
        ConfigError: as `typed` does.
    """
    try:
        return TypeAdapter(Config).validate_python(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e) for e in error.errors())) from None


def _plain(node: Any, prefix: str, problems: list[str], choices: Mapping[str, str]) -> Any:
    """Plain containers with interpolations resolved; what cannot be resolved is collected under its full key."""
    out: dict[Any, Any] = {}
    keys: list[Any] = list(range(len(node))) if isinstance(node, ListConfig) else list(node)
    for key in keys:
        full = f"{prefix}{key}"
        if OmegaConf.is_missing(node, key):
            problems.append(f"{full} is not set; give it on the command line: {full}=VALUE")
            continue
        try:
            value = node[key]
        except OmegaConfBaseException as error:
            problems.append(f"{full} cannot be resolved: {str(error).splitlines()[0]}{_place(full, choices)}")
            continue
        nested = isinstance(value, DictConfig | ListConfig)
        out[key] = _plain(value, f"{full}.", problems, choices) if nested else value
    return list(out.values()) if isinstance(node, ListConfig) else {str(key): value for key, value in out.items()}


def _place(key: str, choices: Mapping[str, str]) -> str:
    """Where the value of a key was chosen, if not on the command line."""
    group = key.split(".")[0]
    return f"; see conf/{group}/{choices[group]}.yaml and the command line" if group in choices else ""


def _explain(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{key} is no setting; `--cfg job` lists them all"
    if error["type"] in ("missing", "missing_argument"):
        return f"{key} is missing from conf/"
    return f"{key}={error['input']!r}: {error['msg']}"


def as_dict(config: Config) -> dict[str, Any]:
    """Plain nested values, for run.json, W&B and checkpoints."""
    return asdict(config)
