"""Which dtype a computation runs in, and which functions are compiled."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar, cast

import torch
from torch import Tensor

# A function that takes the keys of all steps so far is compiled once for each step; the default gives up at 8.
torch._dynamo.config.recompile_limit = 64
# What an earlier process saw of sizes is no input of a training: it would compile the same run otherwise.
torch._dynamo.config.automatic_dynamic_local_pgo = False

F = TypeVar("F", bound=Callable)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products: autocast's where it is on, otherwise the tensor's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def at_least_float32(x: Tensor) -> Tensor:
    """For sums and exponentials, which bf16 would spoil; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def compiled_on_gpu(function: F) -> F:
    """`function`, compiled where its first argument lies on a GPU. A CPU, and an empty batch, run it as it is written.

    Sizes that change from batch to batch become symbols at their first change, so that there are two compilations of
    each call and not one a batch.
    """
    compiled = torch.compile(function, fullgraph=True)

    @wraps(function)
    def either(first: Tensor, *others: object, **named: object) -> object:
        return (compiled if first.is_cuda and first.numel() else function)(first, *others, **named)

    return cast(F, either)
