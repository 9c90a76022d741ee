"""One step of the classes that train.py trains, and the same step by the plain reference, in the same terms."""

import torch
from torch import Tensor

from eagle3.metrics import accept_len_of, rates
from tests.batches import Case
from tests.reference import Network, Result, Verifier, train_step


def reference(case: Case, aux: Tensor, dtype: torch.dtype) -> tuple[Result, dict[str, Tensor]]:
    """The reference's result and its gradients by name, the one of `aux` included."""
    drafter, batch, recipe = case.drafter, dict(case.batch), case.recipe
    weights = {n: p.detach().to(dtype).requires_grad_() for n, p in drafter.named_parameters()}
    leaves = weights | {"aux": aux.detach().to(dtype).requires_grad_()}
    batch |= {"aux": leaves["aux"], "last": batch["last"].to(dtype)}
    shape = drafter.shape
    theta = shape.rope_parameters["rope_theta"]
    net = Network(weights, shape.head_dim, shape.rms_norm_eps, theta, shape.fc_norm, shape.norm_output)
    verifier = Verifier(drafter.embedding.to(dtype), case.head.to(dtype))
    target_ids = drafter.t2d.nonzero().squeeze(1)
    result = train_step(
        net, verifier, target_ids, batch, steps=recipe.ttt_steps, decay=recipe.step_decay, kind=recipe.loss
    )
    if not result.loss.requires_grad:
        return result, {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(result.loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return result, dict(zip(leaves, found, strict=True))


def trained(case: Case) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """Loss, metrics and gradients of the classes that train.py trains."""
    module = case.module()
    aux = case.batch["aux"].clone().requires_grad_()
    _, out = module(case.batch, aux)
    out.loss.backward()
    assert aux.grad is not None
    gradients = {"aux": aux.grad}
    for name, parameter in case.drafter.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad
    module.validation_step(case.batch, 0)
    metrics = rates(module.val_sums, case.recipe.step_decay)
    visited, *accepted = (int(count) for count in module.val_visits.tolist())
    metrics |= {"visited": visited} | {f"accepted_{k}": count for k, count in enumerate(accepted)}
    accept_len = accept_len_of(module.val_visits)
    return out.loss.item(), metrics | ({} if accept_len is None else {"accept_len": accept_len}), gradients


def assert_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    """In relative norm; a gradient that all but cancels is measured against the whole."""
    assert set(ours) == set(theirs)
    for name, error in gradient_errors(ours, theirs).items():
        assert error <= tolerance, f"{name}: {error:.1e}"


def gradient_errors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    whole = float(torch.stack([g.double().norm() for g in theirs.values()]).norm())
    smallest = torch.finfo(torch.float32).tiny
    return {
        name: float((ours[name].double() - want.double()).norm()) / max(float(want.norm()), 1e-2 * whole, smallest)
        for name, want in theirs.items()
    }
