"""A training, planned: everything that can be checked or counted before the first optimizer step."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from eagle3.build import (
    TrainingData,
    always_drafted,
    build_drafter,
    open_checked,
    prepare_data,
    shape_of,
    state_rms,
    warm_start_vocab,
    warn_of_large_states,
    warn_of_serving,
)
from eagle3.config import Config, Hardware, Optimizer
from eagle3.config import Drafter as DrafterSettings
from eagle3.drafter import Eagle3Drafter
from eagle3.export.config import Origin
from eagle3.export.directory import WEIGHTS, find_drafter
from eagle3.module import Recipe
from eagle3.sampler import StepSampler
from eagle3.weights import show_weights
from extract.job import open_verifier
from extract.progress import closing_table
from extract.store_tensors import sha256_of
from extract.verifier import VerifierSpec, load_embedding, load_head, load_tokenizer


@dataclass(frozen=True)
class Schedule:
    """How many optimizer steps there are and where they validate; a function of packs and settings alone."""

    rows_per_step: int
    micro_batches: int
    steps_per_epoch: int
    total_steps: int
    val_every_steps: int

    @property
    def validations(self) -> int:
        return -(-self.total_steps // self.val_every_steps)


@dataclass(frozen=True)
class TrainingPlan:
    store: Path
    inputs: dict[str, str]
    """Fingerprints of the store's samples and of the drafter to start from: a run must not go on with others."""
    origin: Origin
    data: TrainingData
    drafter: Eagle3Drafter
    teacher_head: Float[Tensor, "D H"]
    recipe: Recipe
    schedule: Schedule
    hardware: Hardware
    epochs: int
    max_nonfinite_steps: int

    def samplers(self, rank: int) -> tuple[StepSampler, StepSampler]:
        """One rank's share of the training steps, and of a pass over the validation split."""
        ranks = {"micro_rows": self.hardware.micro_rows, "world_size": self.hardware.devices, "rank": rank}
        train = StepSampler(
            self.data.train_counts.supervised, rows_per_step=self.schedule.rows_per_step, epochs=self.epochs,
            seed=self.recipe.seed, **ranks,
        )  # fmt: skip
        return train, StepSampler.whole(self.data.val_counts.supervised, **ranks)


def plan_training(config: Config) -> TrainingPlan:
    """Opens and checks verifier, store and warm start, and makes every choice that the steps depend on.

    Raises:
        ValueError: naming the file, key or sample, and the remedy.
    """
    spec = open_verifier(config.verifier, Path(config.cache_dir))
    store = open_checked(Path(config.store), spec, config.verifier.capture_layers)
    shape = shape_of(config.drafter, spec, tuple(store.manifest["capture_layers"]))
    init_from = Path(config.drafter.init_from) if config.drafter.init_from else None
    special = load_tokenizer(spec).all_special_ids
    data = prepare_data(
        store, warm_start_vocab(init_from, shape) if init_from else None,
        draft_vocab_size=shape.draft_vocab_size, vocab_size=spec.vocab_size,
        always=always_drafted(special, spec.end_of_turn_ids, spec.vocab_size),
        row_tokens=config.extraction.max_len, overlong=config.data.overlong,
        val_fraction=config.data.val_fraction, seed=config.seed, ttt_steps=config.drafter.ttt_steps,
    )  # fmt: skip
    warn_of_large_states(state_rms(data.train, len(shape.capture_layers)), shape)
    warn_of_serving(shape, spec.model_type)
    head = load_head(spec)
    drafter = build_drafter(shape, data.vocab, load_embedding(spec), head, init_from=init_from, seed=config.seed)
    rows_per_step = config.optimizer.batch_tokens // config.extraction.max_len
    schedule = plan_schedule(data, config.hardware, rows_per_step, config.optimizer.epochs, config.data.val_every_steps)
    return TrainingPlan(
        store=Path(config.store),
        inputs=fingerprints(Path(config.store), init_from),
        origin=origin_of(spec, config.drafter.ttt_steps, config.extraction.max_len),
        data=data,
        drafter=drafter,
        teacher_head=head[data.vocab.target_ids].clone(),
        recipe=recipe_of(config.drafter, config.optimizer, schedule, config.seed),
        schedule=schedule,
        hardware=config.hardware,
        epochs=config.optimizer.epochs,
        max_nonfinite_steps=config.optimizer.max_nonfinite_steps,
    )


def plan_schedule(
    data: TrainingData, hardware: Hardware, rows_per_step: int, epochs: int, val_every_steps: int | None
) -> Schedule:
    """The same number of steps for any number of devices: a step is `rows_per_step` packed rows over all of them."""
    packs = len(data.train)
    rows_per_step = min(rows_per_step, packs)
    steps_per_epoch = -(-packs // rows_per_step)
    total = steps_per_epoch * epochs
    micro_batches = -(-rows_per_step // (hardware.devices * hardware.micro_rows))
    return Schedule(
        rows_per_step, micro_batches, steps_per_epoch, total, min(val_every_steps or steps_per_epoch, total)
    )


def recipe_of(drafter: DrafterSettings, optimizer: Optimizer, schedule: Schedule, seed: int) -> Recipe:
    return Recipe(
        ttt_steps=drafter.ttt_steps,
        step_decay=drafter.step_decay,
        noise_std=drafter.noise_std,
        loss=drafter.loss,
        lr=optimizer.lr,
        betas=(optimizer.betas[0], optimizer.betas[1]),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        warmup_ratio=optimizer.warmup_ratio,
        floor_ratio=optimizer.floor_ratio,
        clip_norm=optimizer.clip_norm,
        total_steps=schedule.total_steps,
        micro_batches=schedule.micro_batches,
        seed=seed,
    )


def origin_of(spec: VerifierSpec, ttt_steps: int, max_len: int) -> Origin:
    return Origin(
        verifier=spec.name,
        verifier_family=spec.model_type,
        verifier_sha256=spec.sha256,
        tokenizer_sha256=spec.tokenizer_sha256,
        chat_template_sha256=spec.chat_template_sha256,
        end_of_turn_ids=spec.end_of_turn_ids,
        ttt_steps=ttt_steps,
        max_len=max_len,
    )


def fingerprints(store: Path, init_from: Path | None) -> dict[str, str]:
    """Over the checksums of all shards and teacher files, and over the weights that a warm start begins with."""
    digest = hashlib.sha256()
    for name in ("index.jsonl", "teacher.jsonl"):
        digest.update((store / name).read_bytes())
    found = {"store": digest.hexdigest()}
    return found if init_from is None else found | {"init_from": sha256_of(find_drafter(init_from) / WEIGHTS)}


def parameter_counts(drafter: Eagle3Drafter) -> tuple[int, int]:
    """(trainable, frozen) numbers of the drafter."""
    trainable = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    return trainable, drafter.embedding.numel()


def show_plan(plan: TrainingPlan) -> None:
    train, val = plan.data.train.plan, plan.data.val.plan
    trainable, frozen = parameter_counts(plan.drafter)
    coverage = plan.data.vocab.coverage
    schedule, shape = plan.schedule, plan.drafter.shape
    lost = train.report.split + train.report.cut + train.report.dropped
    supervised = plan.data.train_counts.supervised.sum(0)[0]
    closing_table(
        "Training plan",
        [
            ("store", str(plan.store)),
            ("train", f"{len(train.refs):,} samples in {len(train.packs):,} rows of {train.row_tokens}, "
                      f"{train.report.fill:.0%} full; {lost} split, cut or left out"),
            ("validation", f"{len(val.refs):,} samples in {len(val.packs):,} rows"),
            ("supervised", f"{supervised:,} drafts at step 0"),
            ("draft vocabulary", f"{plan.data.vocab.size:,} of {plan.data.vocab.vocab_size:,} tokens"
                                 + (f", {coverage:.1%} of supervised tokens" if coverage is not None else "")),
            ("drafter", f"{trainable:,} trained weights in float32, {frozen:,} frozen; "
                        f"layers {list(shape.capture_layers)}"),
            ("steps", f"{schedule.total_steps:,} in {plan.epochs} epochs, each of {schedule.rows_per_step} packed rows "
                      f"in {schedule.micro_batches} micro-batches; K = {plan.recipe.ttt_steps}"),
            ("validates", f"every {schedule.val_every_steps:,} steps, {schedule.validations} times"),
        ],
        None,
    )  # fmt: skip
    show_weights(plan.drafter, plan.teacher_head)
