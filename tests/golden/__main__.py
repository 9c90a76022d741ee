"""Runs the classes that train.py trains on golden fixtures: `python -m tests.golden FILE…`, exit 1 beyond tolerance.

A fixture holds `w.*` weights, `b.*` one packed batch (already shifted: input_ids = x[1:], hidden states of x[:-1],
the verifier's pre-norm states of x[1:]), `g.*` gradients, and the loss and metrics in its metadata. Its rules for
masks, document ends and teachers are its own, so the runner passes them into the core instead of ours.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from eagle3.drafter import DrafterShape, Eagle3Drafter
from eagle3.loss import Teacher, head_and_loss
from eagle3.ttt import unroll
from eagle3.vocab import DraftVocab

RELATIVE = 1e-5
GRADIENT = 1e-4


@dataclass(frozen=True)
class Fixture:
    weights: dict[str, Tensor]
    batch: dict[str, Tensor]
    gradients: dict[str, Tensor]
    case: dict[str, Any]
    metrics: dict[str, float]


def load(path: Path) -> Fixture:
    groups: dict[str, dict[str, Tensor]] = {"w": {}, "b": {}, "g": {}}
    with safe_open(path, "pt") as file:
        for key in file.keys():  # noqa: SIM118 - safe_open is no mapping
            group, name = key.split(".", 1)
            groups[group][name.replace("layers.0.", "midlayer.")] = file.get_tensor(key)
        metadata = file.metadata()
    return Fixture(groups["w"], groups["b"], groups["g"], json.loads(metadata["case"]), json.loads(metadata["metrics"]))


def drafter_of(fixture: Fixture) -> Eagle3Drafter:
    w, case = fixture.weights, fixture.case
    hidden = w["norm.weight"].numel()
    shape = DrafterShape(
        hidden_size=hidden,
        intermediate_size=w["midlayer.mlp.gate_proj.weight"].shape[0],
        num_heads=case["heads"],
        num_kv_heads=case["kv"],
        head_dim=case["head_dim"],
        vocab_size=w["embed_tokens.weight"].shape[0],
        draft_vocab_size=w["lm_head.weight"].shape[0],
        capture_layers=tuple(range(1, w["fc.weight"].shape[1] // hidden + 1)),
        rms_norm_eps=case["eps"],
        rope_parameters={"rope_type": "default", "rope_theta": case["theta"]},
        max_position_embeddings=4096,
        fc_norm=case.get("fc_norm", False),
        norm_output=case.get("norm_output", False),
    )
    vocab = DraftVocab.from_tensors(w["d2t"], w["t2d"])
    drafter = Eagle3Drafter(shape, vocab, w["embed_tokens.weight"])
    ours = {name: tensor for name, tensor in w.items() if name in drafter.state_dict()}
    drafter.load_state_dict(ours, strict=True)
    return drafter


def run(fixture: Fixture) -> dict[str, float]:
    """Worst differences: the loss and each metric relative, each gradient in relative norm."""
    drafter, case, b = drafter_of(fixture), fixture.case, fixture.batch
    steps, count = case["ttt_steps"], b["input_ids"].shape[1]
    # The core reads token r+1+k of x; the fixture holds x[1:], so put one unused token back in front.
    tokens = torch.cat([torch.zeros(1, dtype=torch.long), b["input_ids"][0]])[:count]
    last = F.rms_norm(
        b["verifier_last_hidden_states"][0].float(), [drafter.shape.hidden_size],
        fixture.weights["verifier_norm.weight"], case["eps"],
    )  # fmt: skip
    rows = torch.arange(count)
    at = rows + torch.arange(steps)[:, None]  # in the fixture's shifted numbering
    inside = at < count
    mask = (b["loss_mask"][0][at.clamp(max=count - 1)] > 0) & inside
    # Every row runs at every step; the fixture's masks are not nested, so all chains are kept and masked late.
    states = unroll(
        drafter, b["hidden_states"][0].float(), tokens, b["position_ids"][0], b["document_ids"], rows,
        (at + 1).clamp(max=count - 1),
    )  # fmt: skip
    denominators = mask.sum(1).float() + 1e-5  # the fixture's own
    weight = mask * (case["decay"] ** torch.arange(steps) / denominators)[:, None]
    head = fixture.weights["verifier_lm_head.weight"]
    teacher = Teacher(last, torch.zeros(count), head)
    out = head_and_loss(drafter.norm(states), drafter.lm_head.weight, teacher, at.clamp(max=count - 1), inside, weight)
    out.loss.backward()
    return compare(fixture, drafter, out.loss.item(), out.row_loss.detach(), out.draft, mask, last @ head.T)


def compare(
    fixture: Fixture, drafter: Eagle3Drafter, loss: float, row_loss: Tensor, draft: Tensor, mask: Tensor, logits: Tensor
) -> dict[str, float]:
    steps, count = draft.shape
    at = torch.arange(count) + torch.arange(steps)[:, None]
    teacher = logits.log_softmax(-1)
    entropy = -(teacher.exp() * teacher).sum(-1)
    alive, found = fixture.batch["loss_mask"][0].bool(), {}
    total = 0.0
    for k in range(steps):
        inside, where = at[k] < count, at[k].clamp(max=count - 1)
        alive = alive & inside
        kl = (row_loss[k] - entropy[where])[mask[k]].sum() / (mask[k].sum() + 1e-5)
        found[f"loss_{k}"] = (fixture.case["decay"] ** k * kl).item()
        total += found[f"loss_{k}"]
        before = alive.sum().item()
        alive = alive & (draft[k] == logits.argmax(-1)[where])
        right = (alive & mask[k]).sum().item()
        found[f"full_acc_{k}"] = right / mask[k].sum().item()
        found[f"cond_acc_{k}"] = right / before if before else 0.0
    worst = {name: _relative(found[name], fixture.metrics[name]) for name in found if name in fixture.metrics}
    assert len(worst) == len(found), sorted(set(found) - set(fixture.metrics))
    if "loss" in fixture.metrics:
        worst["loss"] = _relative(total, fixture.metrics["loss"])
    for name, parameter in drafter.named_parameters():
        if name in fixture.gradients:
            assert parameter.grad is not None, name
            want = fixture.gradients[name]
            worst[f"grad {name}"] = ((parameter.grad - want).norm() / want.norm()).item()
    missing = {f"grad {name}" for name in fixture.gradients} - set(worst)
    assert not missing, missing
    return worst


def _relative(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / max(abs(theirs), 1e-8)


def main(paths: list[str]) -> int:
    status = 0
    for path in paths:
        worst = run(load(Path(path)))
        bad = {n: d for n, d in worst.items() if d > (GRADIENT if n.startswith("grad ") else RELATIVE)}
        value = max(d for n, d in worst.items() if not n.startswith("grad "))
        gradient = max(d for n, d in worst.items() if n.startswith("grad "))
        sys.stdout.write(f"{path}: loss and metrics {value:.1e}, gradients {gradient:.1e}\n")
        for name, difference in bad.items():
            status = 1
            sys.stdout.write(f"  {name}: {difference:.2e} is beyond tolerance\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
