"""Tests of eagle3.products: one gradient a weight, summed in its dtype, however often a graph is gone through."""

import pytest
import torch
from torch import Tensor

from eagle3.products import Matrix, hand_over, product


def products(weight: Tensor, xs: list[Tensor]) -> tuple[Matrix, list[Tensor]]:
    matrix = Matrix(weight.detach().to(xs[0].dtype), weight.dtype)
    token = hand_over([weight], lambda: [matrix.take()])
    return matrix, [product(token, x, matrix) for x in xs]


def chain(weight: Tensor, x: Tensor, steps: int) -> Tensor:
    """The same weight over and over, each product of the one before."""
    matrix = Matrix(weight.detach().to(x.dtype), weight.dtype)
    token = hand_over([weight], lambda: [matrix.take()])
    for _ in range(steps):
        x = product(token, x, matrix).tanh()
    return x


def plain(weight: Tensor, x: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        x = (x @ weight.T).tanh()
    return x


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_chain_of_products_has_the_gradients_of_autograd(steps: int):
    weight, x = (torch.randn(6, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    ours = torch.autograd.grad(chain(weight, x, steps).square().sum(), (weight, x))
    theirs = torch.autograd.grad(plain(weight, x, steps).square().sum(), (weight, x))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gradients_of_bf16_products_add_up_in_float32():
    """256 + 1 is 256 in bf16, so that a sum in bf16 would never leave it."""
    weight = torch.ones(1, 1, requires_grad=True)
    xs = [torch.tensor([[256.0]], dtype=torch.bfloat16), *torch.ones(64, 1, 1, dtype=torch.bfloat16)]
    _, results = products(weight, xs)
    torch.stack(results).float().sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32 and weight.grad.item() == 320.0


def test_a_graph_that_is_gone_through_twice_gives_its_gradient_twice():
    weight, x = torch.randn(3, 2, requires_grad=True), torch.randn(4, 2)
    _, [y] = products(weight, [x])
    for times in (1, 2):
        y.sum().backward(retain_graph=times == 1)
        torch.testing.assert_close(weight.grad, times * x.sum(0).expand(3, 2))


def test_a_product_that_nobody_used_adds_nothing():
    weight, x = torch.randn(3, 2, requires_grad=True), torch.randn(4, 2)
    _, [used, _] = products(weight, [x, torch.randn(4, 2)])
    used.sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(3, 2))


def test_rows_of_a_matrix_add_to_their_own_place_in_any_order():
    a, b, x = torch.randn(5, 2), torch.randn(5, 3), torch.randn(5, 4)
    for order in ((0, 1), (1, 0)):
        matrix = Matrix(torch.zeros(5, 4), torch.float32)
        for which in order:
            matrix.add(*((a, x, slice(0, 2)), (b, x, slice(2, 5)))[which])
        torch.testing.assert_close(matrix.take(), torch.cat([a, b], dim=1).T @ x)
        assert not matrix.take().any(), "the sum begins anew"


def test_no_row_gives_a_gradient_of_zeros():
    weight = torch.randn(3, 2, requires_grad=True)
    _, [y] = products(weight, [torch.randn(0, 2)])
    y.sum().backward()
    assert weight.grad is not None and not weight.grad.any()
