"""Rows of a tensor, taken by an index for each step at once, with a gradient that is gathered and not scattered."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3.precision import compiled_on_gpu


def take_steps(x: Float[Tensor, "n W"], index: Int[Tensor, "K R"]) -> tuple[Float[Tensor, "R W"], ...]:
    """x[index[k]] for every step k.

    Within a step a row may be taken several times only if at most one of the takers gets a gradient: of rows that have
    left the active set and all read the last token, say, none does.
    """
    return _Take.apply(x, index)


class _Take(torch.autograd.Function):
    """PyTorch's own gradient of indexing sorts the index, or adds row by row with atomics, once for every step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(index)
        ctx.rows = x.shape[0]
        return tuple(x[of_step] for of_step in index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        if not index.numel():
            return gradients[0].new_zeros(ctx.rows, *gradients[0].shape[1:]), None
        return _gathered(_takers(index, ctx.rows, gradients), gradients), None


def _takers(index: Int[Tensor, "K R"], rows: int, gradients: tuple[Tensor, ...]) -> Int[Tensor, "K n"]:
    """Which row of step k's gradient belongs to row n of x; R, a place behind the last one, where there is none."""
    steps, taken = index.shape
    takers = torch.full((steps, rows), taken, device=index.device)
    return takers.scatter_(1, index, torch.arange(taken, device=index.device).expand_as(index).contiguous())


@compiled_on_gpu
def _gathered(takers: Int[Tensor, "K n"], gradients: tuple[Tensor, ...]) -> Float[Tensor, "n W"]:
    total = torch.zeros((), dtype=torch.float32, device=takers.device)
    for of_step, gradient in zip(takers, gradients, strict=True):
        there = of_step < len(gradient)
        total = total + torch.where(there[:, None], gradient[of_step.clamp(max=len(gradient) - 1)], 0.0)
    return total.to(gradients[0].dtype)
