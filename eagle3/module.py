"""The LightningModule: wiring only. Batches come from `eagle3.data`, the maths from `supervision`, `ttt` and `loss`.

The loss of a micro-batch is its share of the optimizer step's loss: |M_k| of the whole step travels with each batch.
So the sum over micro-batches and ranks is the step's loss, whatever the spread of supervised tokens over them.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from eagle3.drafter import Eagle3Drafter
from eagle3.loss import HeadOutput, Teacher, head_and_loss
from eagle3.metrics import SUMS, replay, response_starts, right_steps, step_sums
from eagle3.precision import compute_dtype
from eagle3.schedule import lr_at
from eagle3.step import final_norm
from eagle3.supervision import Supervision, supervise
from eagle3.ttt import add_noise, unroll


@dataclass(frozen=True)
class Recipe:
    """How a drafter is trained: the settings that the optimizer step depends on."""

    ttt_steps: int
    step_decay: float
    noise_std: float
    loss: str
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    warmup_ratio: float
    floor_ratio: float
    clip_norm: float
    total_steps: int
    micro_batches: int
    seed: int


class DrafterModule(pl.LightningModule):
    """Trains `drafter`. `train_sums` and `val_sums` gather what the run log reports; whoever reports resets them."""

    teacher_head: Tensor
    train_sums: Tensor
    val_sums: Tensor
    val_visits: Tensor

    def __init__(self, drafter: Eagle3Drafter, teacher_head: Float[Tensor, "D H"], recipe: Recipe):
        super().__init__()
        self.drafter = drafter
        self.recipe = recipe
        self.register_buffer("teacher_head", teacher_head, persistent=False)
        self.register_buffer("train_sums", self._zeros(), persistent=False)
        self.register_buffer("val_sums", self._zeros(), persistent=False)
        # Greedy responses of the validation split: rows visited, then accepted at each position.
        visits = torch.zeros(1 + recipe.ttt_steps, dtype=torch.float64)
        self.register_buffer("val_visits", visits, persistent=False)
        self.grad_norm = float("nan")
        self.step = 0
        """Optimizer step of the whole run, as the sampler counts it; Lightning's own counter restarts on resume."""

    def configure_model(self) -> None:
        """Under FSDP2 every process holds its part of weights, gradients and optimizer state; forward gathers weights.

        One group of all weights, gathered once a forward and kept to its backward: with a single layer and a head
        there is nothing to gather in turn.
        """
        if self.device_mesh is not None:
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def _zeros(self) -> Tensor:
        return torch.zeros(len(SUMS), self.recipe.ttt_steps, dtype=torch.float64)

    def forward(self, batch: dict[str, Any], aux: Float[Tensor, "B T AH"]) -> tuple[Supervision, HeadOutput]:
        """Row sets, and what the head says on them, for one micro-batch [B, T]."""
        plan = supervise(
            batch["input_ids"], batch["loss_mask"], batch["document"], batch["top1"],
            self.drafter.t2d, self.recipe.ttt_steps,
        )  # fmt: skip
        states = unroll(
            self.drafter, aux.flatten(0, 1), batch["input_ids"].flatten(), batch["position"].flatten(),
            batch["document"], plan.rows, plan.index,
        )  # fmt: skip
        out = head_and_loss(
            torch.stack([final_norm(self.drafter, state) for state in states]), self.drafter.lm_head.weight,
            Teacher(batch["last"].flatten(0, 1), batch["lse"].flatten(), self.teacher_head),
            plan.index, plan.active, self._weights(plan, batch["supervised_total"]), loss=self.recipe.loss,
        )  # fmt: skip
        return plan, out

    def _weights(self, plan: Supervision, supervised_total: Tensor) -> Float[Tensor, "K R"]:
        """decay^k / |M_k| on supervised rows. An empty M_k has no such row, so its clamped count is never used."""
        step = torch.arange(self.recipe.ttt_steps, device=plan.rows.device)
        weight = self.recipe.step_decay**step / supervised_total.clamp(min=1)
        return plan.supervised * weight.float()[:, None]

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        if batch["step"] != self.step:
            # The last step's gradients are of no more use: they would lie beside everything that backward needs.
            self.zero_grad(set_to_none=True)
        self.step = batch["step"]
        seeds = [_noise_seed(self.recipe.seed, batch["step"], row) for row in batch["rows"].tolist()]
        dtype = compute_dtype(self.drafter.fc.weight)
        plan, out = self(batch, add_noise(batch["aux"], self.recipe.noise_std, seeds, dtype))
        self.train_sums += step_sums(out, self.drafter.target_ids(out.draft), plan)
        # Lightning divides by the number of micro-batches and DDP by that of processes; this loss is a sum over both.
        return out.loss * self.recipe.micro_batches * self.trainer.world_size

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        plan, out = self(batch, batch["aux"])
        drafted = self.drafter.target_ids(out.draft)
        self.val_sums += step_sums(out, drafted, plan)
        greedy = batch["greedy"].flatten()[plan.rows]
        right = right_steps(drafted, plan)[:, greedy]
        rows = plan.rows[greedy]
        for visited, by_position in replay(right, response_starts(rows, batch["document"])):
            self.val_visits += torch.tensor([visited, *by_position], device=self.device)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Weights and optimizer state are restored; Lightning's loop counters are not.

        Where the run goes on is the sampler's start step, which is one number and cannot disagree with itself.
        """
        del checkpoint["loops"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = parameter_groups(self.drafter, self.recipe.weight_decay)
        return torch.optim.AdamW(groups, lr=self.recipe.lr, betas=self.recipe.betas, eps=self.recipe.eps, fused=True)

    def learning_rate(self, step: int) -> float:
        r = self.recipe
        return lr_at(step, peak=r.lr, total_steps=r.total_steps, warmup_ratio=r.warmup_ratio, floor_ratio=r.floor_ratio)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The rate is a function of the optimizer step alone: nothing to save, nothing to get out of step."""
        for group in optimizer.param_groups:
            group["lr"] = self.learning_rate(self.step)

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        """Clips to the norm over all weights, of all processes where they are sharded, and keeps it for the run log.

        A norm that is not finite would make every weight NaN. It is the same on all ranks, and so is the answer: they
        drop their gradients, which leaves weights, moments and Adam's own count of steps as they are.
        """
        trainable = [p for p in self.drafter.parameters() if p.requires_grad]
        norm = nn.utils.clip_grad_norm_(trainable, self.recipe.clip_norm)
        self.grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not math.isfinite(self.grad_norm):
            for weight in trainable:
                weight.grad = None


def parameter_groups(drafter: Eagle3Drafter, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, norms do not."""
    trainable = [p for p in drafter.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]


def _noise_seed(seed: int, step: int, row: int) -> int:
    digest = hashlib.sha256(f"noise {seed} {step} {row}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1
