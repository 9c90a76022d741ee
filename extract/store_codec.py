"""How captured states lie in a shard: as they are, or in eight bits with a scale a token and layer.

fp8 is e4m3: four significant bits, so a number is off by at most 1/16 of itself, or, where it is below 1/28,672 of its
row's largest, by at most 1/458,752 of that. `last` keeps its dtype: the teacher's logits are made of it.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Float32
from torch import Tensor

CODECS = ("none", "fp8")
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""A row of zeros has this one; below it a scale itself would lose bits."""
_ITEMS_A_CHUNK = 1 << 19
"""Small enough for a core's cache: through main memory each step would take three times as long."""


def encode(aux: Float[Tensor, "T AH"], layers: int) -> tuple[Float[Tensor, "T AH"], Float32[Tensor, "T A"]]:
    """Codes and scales: the largest number of a token and layer becomes 448, and nothing becomes infinite.

    A row with NaN or an infinity comes back without a finite number. What was decoded to bf16 encodes
    to the same again.
    """
    rows = aux.reshape(len(aux) * layers, -1)
    codes, scales = torch.empty(rows.shape, dtype=FP8), torch.empty(len(rows))
    wide = torch.empty(min(len(rows), _rows_a_chunk(rows.shape[1])), rows.shape[1])
    for chunk in _chunks(len(rows), rows.shape[1]):
        largest = rows[chunk].abs().amax(dim=1)
        scale = largest.float().div_(FP8_MAX).clamp_(min=SMALLEST_SCALE)
        codes[chunk] = torch.div(rows[chunk], scale[:, None], out=wide[: len(scale)])
        scales[chunk] = scale
    return codes.view(aux.shape), scales.view(len(aux), layers)


def decode(codes: Float[Tensor, "T AH"], scales: Float32[Tensor, "T A"], dtype: torch.dtype) -> Float[Tensor, "T AH"]:
    """The states, in float32 until they are rounded to `dtype`; three times as fast as torch's own conversion."""
    rows, scale = codes.view(torch.int8).reshape(scales.numel(), -1), scales.reshape(-1, 1)
    decoded = torch.empty(rows.shape, dtype=dtype)
    wide = torch.empty(min(len(rows), _rows_a_chunk(rows.shape[1])), rows.shape[1], dtype=torch.int32)
    for chunk in _chunks(len(rows), rows.shape[1]):
        bits = wide[: len(scale[chunk])]
        bits.copy_(rows[chunk])
        # Sign, exponent and fraction where float32 has them; the exponent's bias differs by 120.
        bits.bitwise_left_shift_(20).bitwise_and_(0x87F00000 - (1 << 32))
        decoded[chunk] = bits.view(torch.float32).mul_(2.0**120).mul_(scale[chunk])
    return decoded.view(codes.shape)


def _rows_a_chunk(width: int) -> int:
    return max(1, _ITEMS_A_CHUNK // width)


def _chunks(rows: int, width: int) -> Iterator[slice]:
    step = _rows_a_chunk(width)
    return (slice(begin, begin + step) for begin in range(0, rows, step))
