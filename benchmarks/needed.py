"""What a training step really needs: its floating-point operations, and the matrix rate to hold them against."""

from collections.abc import Sequence

import torch

from eagle3.drafter import DrafterShape

TRAINED = 3
"""A product in the forward pass, and one each for the gradients of its input and of its matrix."""


def flops_needed(shape: DrafterShape, *, tokens: int, active: Sequence[int], document: int) -> float:
    """Matrix products of one step: step-0 keys of all tokens, everything else on the active rows of each TTT step.

    Args:
        tokens: of all packed rows.
        active: |A_k| for each step k.
        document: tokens of each document; its active rows are its last ones.
    """
    hidden, queries = shape.hidden_size, shape.num_heads * shape.head_dim
    keys = 2 * shape.num_kv_heads * shape.head_dim
    rows, first, later = sum(active), active[0], sum(active[1:])
    layers = len(shape.capture_layers)
    products = 2 * 2 * tokens * layers * hidden * hidden  # fc: nothing before it takes a gradient
    products += TRAINED * 2 * hidden * tokens * (queries + keys)  # the embedding's half, once
    products += TRAINED * 2 * hidden * (tokens * keys + first * queries + later * (queries + keys))
    products += TRAINED * 2 * rows * hidden * (queries + 3 * shape.intermediate_size)
    teachers = first + len(active) * tokens // document
    products += 2 * hidden * shape.draft_vocab_size * (TRAINED * rows + teachers)
    share = first / tokens
    seen = document * (1 - share / 2)  # keys of an active row, on average
    return products + 3.5 * 4 * rows * seen * queries


def matrix_rate(device: torch.device, size: int = 8192) -> float:
    """FLOP/s of a large bf16 product on this device, now; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        a @ b
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        a @ b
    end.record()
    end.synchronize()
    return 20 * 2 * size**3 / (begin.elapsed_time(end) / 1000)
