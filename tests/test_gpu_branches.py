"""The branches that only a GPU takes, taken on a CPU: tensors say that they lie on one, and nothing is compiled."""

from collections.abc import Iterator

import pytest
import torch

from eagle3.attention import BlockSight, DenseSight, sight_of
from eagle3.precision import compiled_on_gpu
from tests.batches import Case, make_case


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    # A CPU has no product of bf16 matrices that sums in float32.
    monkeypatch.setattr("eagle3.products._sums_in", lambda dtype, x: False)
    with torch.compiler.set_stance("force_eager"):
        yield


def none_active(dtype: torch.dtype) -> tuple[float, Case]:
    case = make_case([[2, 1], [2]], ttt_steps=3, num_kv_heads=1)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        plan, out = case.module()(case.batch, case.batch["aux"])
    assert len(plan.rows) == 0
    out.loss.backward()
    return out.loss.item(), case


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_micro_batch_without_an_active_row_gives_zero_loss_and_gradients(as_on_a_gpu: None, dtype: torch.dtype):
    loss, case = none_active(dtype)
    assert loss == 0.0
    for name, weight in case.drafter.named_parameters():
        assert weight.grad is not None and weight.grad.dtype == torch.float32 and not weight.grad.any(), name


def test_only_rows_that_there_are_become_blocks(as_on_a_gpu: None):
    document = torch.zeros(1, 8, dtype=torch.int32)
    rows = torch.arange(3)
    assert isinstance(sight_of(rows, document), BlockSight)
    assert isinstance(sight_of(rows[:0], document), DenseSight)


def test_an_empty_batch_is_not_compiled(as_on_a_gpu: None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: lambda x: "compiled")
        either = compiled_on_gpu(lambda x: "as written")
    assert either(torch.zeros(0, 4)) == "as written" and either(torch.zeros(1, 4)) == "compiled"
