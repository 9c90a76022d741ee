"""One step of the drafter's layer, as functions of tensors: training, replay and decoding run these and no others.

q, k and v read cat(e, hidden_norm(h)), so each of their matrices falls into a half for the embedding and a half for the
state. The embedding half of a token is the same at every step: it is projected once and read where a step needs it.
Legend: n rows, H hidden, W width of queries (heads * hd), V of keys and values (kv * hd).
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

from eagle3.drafter import Eagle3Drafter
from eagle3.precision import at_least_float32, compiled_on_gpu, compute_dtype

Angles = tuple[Tensor, Tensor]
"""Cosine and sine of RoPE, [n, hd] each, float32 at least."""


class Halves(NamedTuple):
    """What one input, embedding or state, contributes to queries, keys and values; or the matrices that make it."""

    query: Any
    key: Any
    value: Any


class Matrices(NamedTuple):
    """The layer's matrices in the dtype of matrix products: converted once for all steps of a forward."""

    embedding: Halves
    state: Halves
    out: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


def matrices_of(drafter: Eagle3Drafter) -> Matrices:
    """Views of the weights where they have that dtype already, copies that pass gradients on where not."""
    attention, mlp = drafter.midlayer.self_attn, drafter.midlayer.mlp
    dtype = compute_dtype(drafter.fc.weight)
    wide = [p.weight.to(dtype) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
    out, gate, up, down = (p.weight.to(dtype) for p in (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    embedding, state = zip(*(w.chunk(2, dim=1) for w in wide), strict=True)
    return Matrices(Halves(*embedding), Halves(*state), out, gate, up, down)


def embedding_halves(e: Float[Tensor, "n H"], matrices: Matrices) -> Halves:
    """[n, W], [n, V], [n, V] of the normed embeddings."""
    e = e.to(matrices.out.dtype)
    return Halves(*(F.linear(e, w) for w in matrices.embedding))


def normed_state(drafter: Eagle3Drafter, h: Float[Tensor, "n H"]) -> Float[Tensor, "n H"]:
    """What the state halves read, in the dtype of matrix products."""
    norm = drafter.midlayer.hidden_norm
    return _norm(h, norm.weight, drafter.shape.rms_norm_eps, compute_dtype(h))


def final_norm(drafter: Eagle3Drafter, states: Float[Tensor, "*n H"]) -> Float[Tensor, "*n H"]:
    """What the head reads, in the dtype of matrix products."""
    return _norm(states, drafter.norm.weight, drafter.shape.rms_norm_eps, compute_dtype(states))


def heads_of(
    drafter: Eagle3Drafter, x: Float[Tensor, "n H"], e: Float[Tensor, "n width"], state: Tensor, angles: Angles
) -> Float[Tensor, "n heads hd"]:
    """Rotated queries or keys: `e` is the embedding's half, `state` the matrix of the state's half."""
    return _rotated(x, e, state, *angles, drafter.shape.head_dim)


def values_of(
    drafter: Eagle3Drafter, x: Float[Tensor, "n H"], e: Float[Tensor, "n V"], state: Tensor
) -> Float[Tensor, "n kv hd"]:
    return torch.addmm(e, x, state.T).unflatten(-1, (-1, drafter.shape.head_dim))


def angles_at(drafter: Eagle3Drafter, position: Tensor) -> Angles:
    """RoPE at absolute positions."""
    wide = at_least_float32(drafter.fc.weight[:0, :0])  # only its dtype and device are read
    cos, sin = drafter.rotary(wide, position[None])
    return cos[0], sin[0]


def finish(
    drafter: Eagle3Drafter, h: Float[Tensor, "n H"], attended: Float[Tensor, "n W"], matrices: Matrices
) -> Float[Tensor, "n H"]:
    """The rest of the layer after attention: output projection, residual on the un-normed state, MLP."""
    norm = drafter.midlayer.post_attention_layernorm.weight
    _, _, out, gate, up, down = matrices
    return _finished(h, attended.to(out.dtype), out, norm, drafter.shape.rms_norm_eps, gate, up, down)


@compiled_on_gpu
def _norm(h: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return F.rms_norm(h, h.shape[-1:], weight, eps).to(dtype)


@compiled_on_gpu
def _rotated(x: Tensor, e: Tensor, state: Tensor, cos: Tensor, sin: Tensor, head_dim: int) -> Tensor:
    # One product that is added to the other half before it is rounded.
    wide = at_least_float32(torch.addmm(e, x, state.T)).unflatten(-1, (-1, head_dim))
    turned = wide * cos[:, None] + rotate_half(wide) * sin[:, None]
    return turned.to(x.dtype)


@compiled_on_gpu
def _finished(
    h: Tensor, attended: Tensor, out: Tensor, norm: Tensor, eps: float, gate: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    h = h + F.linear(attended, out)
    x = F.rms_norm(h, h.shape[-1:], norm, eps).to(out.dtype)
    return h + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
