"""The classes that train.py trains, and the plain reference, on golden fixtures: `python -m tests.golden FILE…`.

Prints the worst difference of loss, metrics and gradients of each file for both, and exits 1 if one is beyond
tolerance. Any file of the form that `tests.golden.fixture` describes will do, of any sizes.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from eagle3.drafter import DrafterShape, Eagle3Drafter
from eagle3.loss import Teacher, head_and_loss
from eagle3.ttt import unroll
from eagle3.vocab import DraftVocab
from tests import reference
from tests.golden.fixture import Fixture, differences, load, metrics_of

RELATIVE = 1e-5
"""Of the loss and of each metric."""
GRADIENT = 1e-4
"""Of each gradient, in relative norm."""

Outcome = tuple[dict[str, float], dict[str, Tensor]]
"""Metrics, and gradients by weight."""


def training_classes(fixture: Fixture) -> Outcome:
    """The drafter's core with the fixture's rows, masks and teachers instead of ours."""
    drafter, b, slots = _drafter_of(fixture), fixture.batch, fixture.slots
    # The core reads token r+1+k of x; the fixture holds x[1:], so an unused token comes in front and a 0 behind it.
    tokens = torch.cat([torch.zeros(1, dtype=torch.long), b["input_ids"][0]])
    document = torch.cat([b["document_ids"], torch.full((1, 1), -1)], dim=1)
    padded = [torch.cat([x[0].float(), x[0, :1].float()]) for x in (b["hidden_states"], b["position_ids"])]
    at = fixture.at.clamp(max=slots - 1)
    index = torch.where(fixture.at < slots, fixture.at + 1, 0)
    states = torch.stack(unroll(drafter, padded[0], tokens, padded[1].long(), document, torch.arange(slots), index))
    teacher = Teacher(fixture.last, torch.zeros(slots), fixture.weights["verifier_lm_head.weight"])
    out = head_and_loss(
        drafter.norm(states), drafter.lm_head.weight, teacher, at, fixture.at < slots, fixture.weight.float()
    )
    out.loss.backward()
    gradients = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    log_p = fixture.verdict.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)  # the loss is a cross-entropy, the fixture's a divergence
    return metrics_of(fixture, out.row_loss.detach() - entropy[at], out.draft), gradients


def plain_reference(fixture: Fixture) -> Outcome:
    """tests/reference.py, all slots and steps at once."""
    case, b = fixture.case, fixture.batch
    names = [name for name in _drafter_of(fixture).state_dict() if name not in ("d2t", "t2d")]
    weights = {name: fixture.weights[name].clone().requires_grad_() for name in names}
    net = reference.Network(weights, case["head_dim"], case["eps"], case["theta"], case["fc_norm"], case["norm_output"])
    verifier = reference.Verifier(fixture.weights["embed_tokens.weight"], fixture.weights["verifier_lm_head.weight"])
    slot, document = torch.arange(fixture.slots), b["document_ids"][0]
    same = (document[:, None] == document) & (document >= 0)
    visible = (same & (slot[:, None] >= slot)) | (slot[:, None] == slot)
    states = reference.unrolled(
        net, verifier, b["hidden_states"][0].float(), b["position_ids"][0], list(fixture.reads), visible
    )
    log_p = fixture.verdict.log_softmax(-1)[fixture.at.clamp(max=fixture.slots - 1)]
    log_q = torch.stack([reference.head(net, state) for state in states]).log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    loss = (kl * fixture.weight).sum()
    found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True, materialize_grads=True)
    return metrics_of(fixture, kl.detach(), log_q.argmax(-1)), dict(zip(weights, found, strict=True))


PATHS: Mapping[str, Callable[[Fixture], Outcome]] = {
    "reference": plain_reference,
    "training classes": training_classes,
}


def _drafter_of(fixture: Fixture) -> Eagle3Drafter:
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
        max_position_embeddings=1 << 20,
        fc_norm=case["fc_norm"],
        norm_output=case["norm_output"],
    )
    drafter = Eagle3Drafter(shape, DraftVocab.from_tensors(w["d2t"], w["t2d"]), w["embed_tokens.weight"])
    drafter.load_state_dict({name: w[name] for name in drafter.state_dict()}, strict=True)
    return drafter


def main(paths: list[str]) -> int:
    status = 0
    for path in paths:
        try:
            fixture = load(Path(path))
        except ValueError as error:
            sys.stdout.write(f"{error}\n")
            status = 1
            continue
        for name, compute in PATHS.items():
            worst = differences(fixture, *compute(fixture))
            sys.stdout.write(f"{path}: {name}: {_told(worst)}\n")
            for value, difference in worst.items():
                # A NaN is within no tolerance.
                if not difference <= (GRADIENT if value.startswith("grad ") else RELATIVE):
                    status = 1
                    sys.stdout.write(f"  {value}: {difference:.2e} is beyond tolerance\n")
    return status


def _told(worst: Mapping[str, float]) -> str:
    groups = {
        "loss": [d for name, d in worst.items() if name.startswith("loss")],
        "metrics": [d for name, d in worst.items() if not name.startswith(("loss", "grad "))],
        "gradients": [d for name, d in worst.items() if name.startswith("grad ")],
    }
    return ", ".join(f"{name} {max(found, default=0.0):.1e}" for name, found in groups.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
