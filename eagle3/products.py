"""Matrix products of one forward pass whose weights get their gradient once, summed in float32 over all products.

Autograd would give every product of every step a gradient of its weight in the dtype of products, and add them up in
that dtype. Here each backward adds its own product to one sum per weight, and a node behind all of them hands the sums
to the weights. What ties the two together is a token: an empty tensor that every product takes and that node made.
Legend: n rows, I width in, O width out.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


class Matrix:
    """One weight as products read it, [O, I], and the sum of what its products said about its gradient so far."""

    def __init__(self, value: Float[Tensor, "O I"], dtype: torch.dtype):
        """`dtype` is that of the gradient."""
        self.value = value
        self.dtype = dtype
        self._sum: Tensor | None = None

    def add(self, gradient: Float[Tensor, "n O"], x: Float[Tensor, "n I"], rows: slice = slice(None)) -> None:
        """Of a product x @ value[rows].T, from the gradient of its result."""
        whole = rows == slice(None)
        if self._sum is None and whole and _sums_in(self.dtype, x):
            self._sum = torch.mm(gradient.T, x, out_dtype=self.dtype)
            return
        if self._sum is None:
            self._sum = torch.zeros_like(self.value, dtype=self.dtype)
        add_product(self._sum[rows], gradient, x)

    def take(self) -> Float[Tensor, "O I"]:
        """The sum, which starts again from nothing."""
        found = torch.zeros_like(self.value, dtype=self.dtype) if self._sum is None else self._sum
        self._sum = None
        return found


def add_product(total: Float[Tensor, "O I"], a: Float[Tensor, "n O"], b: Float[Tensor, "n I"]) -> None:
    """total += a.T @ b, summed in `total`'s own dtype where the device can."""
    if _sums_in(total.dtype, a):
        torch.addmm(total, a.T, b, out_dtype=total.dtype, out=total)
    else:
        total += a.T @ b


def _sums_in(dtype: torch.dtype, x: Tensor) -> bool:
    return x.is_cuda and x.dtype != dtype and len(x) > 0


def hand_over(weights: Sequence[Tensor], gradients: Callable[[], Sequence[Tensor]]) -> Tensor:
    """The token. `gradients()` is asked once all products that took it have gone backward: one for each weight."""
    return _HandOver.apply(gradients, *weights)


def product(token: Tensor, x: Float[Tensor, "n I"], matrix: Matrix) -> Float[Tensor, "n O"]:
    return _Product.apply(token, x, matrix)


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: Callable[[], Sequence[Tensor]], *weights: Tensor) -> Tensor:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)  # products return None for the token: only their order matters
        return weights[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradients()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, x: Tensor, matrix: Matrix) -> Tensor:
        ctx.save_for_backward(x)
        ctx.matrix = matrix
        return x @ matrix.value.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        ctx.matrix.add(gradient, x)
        return None, gradient @ ctx.matrix.value, None
