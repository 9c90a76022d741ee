"""A golden fixture: the step of another trainer, its rules for masks, document ends and teachers, and its values.

    w.*   weights          layers.0 is the layer, verifier_norm and verifier_lm_head (draft rows) make the teacher
    b.*   one packed row   of S slots, already shifted: input_ids are x[1:], hidden_states those of x[:-1], the
                           verifier's last states those of x[1:] before its norm, loss_mask that of x[1:]
    g.*   gradients of the loss
    metadata               `case`: heads, kv, head_dim, eps, theta, ttt_steps, decay and EAGLE-3.1's flags; `metrics`

Its rules are its own. At step k slot i reads the token k slots on and is taught by the verifier k slots on, whatever
document they belong to, where the mask k slots on is 1. Every slot runs at every step; step-0 keys are those of the
document, later ones the slot's own. The loss of a step is the mean KL divergence over the draft vocabulary, weighted
by decay^k.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

REFUSED = {"layers": (1,), "sliding": (None,), "norm_before_residual": (False,), "norm_before_fc": (False,)}
"""What a case may say of networks that are not served as EAGLE-3 heads here."""


@dataclass(frozen=True)
class Fixture:
    weights: dict[str, Tensor]
    batch: dict[str, Tensor]
    gradients: dict[str, Tensor]
    case: dict[str, Any]
    metrics: dict[str, float]

    @property
    def at(self) -> Tensor:
        """[K, S]: the slot whose token a slot reads at each step, and whose verifier teaches it; S and more is none."""
        return torch.arange(self.slots) + torch.arange(self.case["ttt_steps"])[:, None]

    @property
    def slots(self) -> int:
        return self.batch["input_ids"].shape[1]

    @property
    def mask(self) -> Tensor:
        """[K, S]: which slots are supervised at each step."""
        inside = self.at < self.slots
        return (self.batch["loss_mask"][0][self.at.clamp(max=self.slots - 1)] > 0) & inside

    @property
    def reads(self) -> Tensor:
        """[K, S]: token ids; a slot that reads beyond the end reads 0."""
        tokens = F.pad(self.batch["input_ids"][0], (0, self.case["ttt_steps"]))
        return tokens[self.at]

    @property
    def weight(self) -> Tensor:
        """[K, S]: decay^k over the number of supervised slots, which the fixture keeps off 0 by adding 1e-5."""
        decay = self.case["decay"] ** torch.arange(self.case["ttt_steps"])
        return self.mask * (decay / (self.mask.sum(1) + 1e-5))[:, None]

    @property
    def last(self) -> Tensor:
        """[S, H]: the verifier's final states after its norm."""
        states, norm = self.batch["verifier_last_hidden_states"][0].float(), self.weights["verifier_norm.weight"]
        return F.rms_norm(states, [states.shape[-1]], norm, self.case["eps"])

    @property
    def verdict(self) -> Tensor:
        """[S, D]: the verifier's logits over the draft vocabulary."""
        return self.last @ self.weights["verifier_lm_head.weight"].T


def load(path: Path) -> Fixture:
    """ValueError names what a fixture asks for that these classes do not compute."""
    groups: dict[str, dict[str, Tensor]] = {"w": {}, "b": {}, "g": {}}
    with safe_open(path, "pt") as file:
        for key in file.keys():  # noqa: SIM118 - safe_open is no mapping
            group, name = key.split(".", 1)
            groups[group][name.replace("layers.0.", "midlayer.")] = file.get_tensor(key)
        metadata = file.metadata()
    case = {"fc_norm": False, "norm_output": False} | json.loads(metadata["case"])
    for name, allowed in REFUSED.items():
        if name in case and case[name] not in allowed:
            raise ValueError(f"{path}: {name} is {case[name]} in this case, an EAGLE-3 drafter has {allowed[0]}")
    return Fixture(groups["w"], groups["b"], groups["g"], case, json.loads(metadata["metrics"]))


def save(path: Path, fixture: Fixture) -> Path:
    tensors = {
        f"{group}.{name.replace('midlayer.', 'layers.0.')}": tensor.contiguous()
        for group, named in (("w", fixture.weights), ("b", fixture.batch), ("g", fixture.gradients))
        for name, tensor in named.items()
    }
    save_file(tensors, path, {"case": json.dumps(fixture.case), "metrics": json.dumps(fixture.metrics)})
    return path


def metrics_of(fixture: Fixture, kl: Tensor, draft: Tensor) -> dict[str, float]:
    """The fixture's metrics from KL divergences and drafts [K, S].

    full_acc_k: supervised slots of which steps 0..k are all the teacher's choice, absent where none is supervised;
    cond_acc_k: the same slots among all whose steps before k were (a denominator that the mask does not restrict), 0
    where there are none.
    """
    mask, at, last = fixture.mask, fixture.at, fixture.slots - 1
    choice = fixture.verdict.argmax(-1)
    alive, found = fixture.batch["loss_mask"][0].bool(), {"loss": 0.0}
    for k, supervised in enumerate(mask):
        found[f"loss_{k}"] = float((fixture.weight[k] * kl[k]).sum())
        found["loss"] += found[f"loss_{k}"]
        alive = alive & (at[k] <= last)
        before = int(alive.sum())
        alive = alive & (draft[k] == choice[at[k].clamp(max=last)])
        right = int((alive & supervised).sum())
        found |= {f"full_acc_{k}": right / int(supervised.sum())} if supervised.any() else {}
        found[f"cond_acc_{k}"] = right / before if before else 0.0
    return found


def differences(fixture: Fixture, metrics: Mapping[str, float], gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """The loss and each metric relative, each gradient in relative norm; every value of the fixture is compared."""
    empty = {name for name in fixture.metrics if name not in metrics}
    assert all(name.startswith("full_acc_") for name in empty), empty
    worst = {
        name: abs(metrics[name] - value) / max(abs(value), 1e-8)
        for name, value in fixture.metrics.items()
        if name not in empty
    }
    for name, want in fixture.gradients.items():
        norm = max(float(want.norm()), torch.finfo(torch.float32).tiny)
        worst[f"grad {name}"] = float((gradients[name] - want).norm()) / norm
    return worst
