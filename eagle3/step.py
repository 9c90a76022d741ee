"""One step of the drafter's layer, as functions of tensors: training, replay and decoding run these and no others.

q, k and v read cat(e, hidden_norm(h)), so each of their matrices falls into a half for the embedding and a half for the
state. The embedding half of a token is the same at every step: it is projected once and read where a step needs it.
Legend: n rows, H hidden, W width of queries (heads * hd), V of keys and values (kv * hd),
Q = W + 2V of all three, I of the MLP.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

from eagle3.drafter import DrafterShape, Eagle3Drafter
from eagle3.precision import at_least_float32, compiled_on_gpu, compute_dtype
from eagle3.products import Matrix, hand_over, product

Angles = tuple[Tensor, Tensor]
"""Cosine and sine of RoPE, [n, hd] each, float32 at least."""


@dataclass(frozen=True)
class Matrices:
    """The layer's matrices in the dtype of matrix products: converted once for all steps of a forward."""

    embedding: Matrix
    """[Q, H]: queries, keys and values of the embedding's half, one below the other."""
    state: Matrix
    """[Q, H], of the state's half."""
    out: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix
    token: Tensor
    """What every product takes, so that the weights get their gradients after the last of them."""


@dataclass(frozen=True)
class Part:
    """Some of queries, keys and values, which lie one below the other in a matrix."""

    heads: tuple[int, int, int]
    """How many of each."""
    rows: slice
    """Their rows of the matrices, and their columns of what these make."""


def queries_of(shape: DrafterShape) -> Part:
    return Part((shape.num_heads, 0, 0), slice(0, shape.num_heads * shape.head_dim))


def keys_and_values_of(shape: DrafterShape) -> Part:
    kv, whole = shape.num_kv_heads, all_of(shape).rows
    return Part((0, kv, kv), slice(shape.num_heads * shape.head_dim, whole.stop))


def all_of(shape: DrafterShape) -> Part:
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    return Part(heads, slice(0, sum(heads) * shape.head_dim))


def matrices_of(drafter: Eagle3Drafter) -> Matrices:
    """Copies of q, k and v by halves; of the others views of the weights where they have the dtype already."""
    attention, mlp = drafter.midlayer.self_attn, drafter.midlayer.mlp
    wide = [p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
    others = [p.weight for p in (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    dtype, own = compute_dtype(drafter.fc.weight), drafter.fc.weight.dtype
    with torch.no_grad():
        embedding, state = (
            Matrix(_stacked(half, dtype), own) for half in zip(*(w.chunk(2, dim=1) for w in wide), strict=True)
        )
        plain = out, gate, up, down = [Matrix(weight.detach().to(dtype), own) for weight in others]

    def gradients() -> list[Tensor]:
        by_half = zip(*(half.take().split([len(w) for w in wide]) for half in (embedding, state)), strict=True)
        return [*(torch.cat(pair, dim=1) for pair in by_half), *(matrix.take() for matrix in plain)]

    return Matrices(embedding, state, out, gate, up, down, hand_over([*wide, *others], gradients))


def _stacked(parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    stacked = parts[0].new_empty(sum(len(part) for part in parts), parts[0].shape[1], dtype=dtype)
    for part, place in zip(parts, stacked.split([len(part) for part in parts]), strict=True):
        place.copy_(part)
    return stacked


def embedding_half(drafter: Eagle3Drafter, tokens: Int[Tensor, "n"], matrices: Matrices) -> Float[Tensor, "n Q"]:
    """What tokens contribute to queries, keys and values at any step."""
    e, norm = F.embedding(tokens, drafter.embedding), drafter.midlayer.input_layernorm.weight
    return product(matrices.token, _norm(e, norm, drafter.shape.rms_norm_eps, compute_dtype(norm)), matrices.embedding)


def normed_state(drafter: Eagle3Drafter, h: Float[Tensor, "n H"]) -> Float[Tensor, "n H"]:
    """What the state halves read, in the dtype of matrix products."""
    norm = drafter.midlayer.hidden_norm
    return _norm(h, norm.weight, drafter.shape.rms_norm_eps, compute_dtype(h))


def final_norm(drafter: Eagle3Drafter, states: Float[Tensor, "*n H"]) -> Float[Tensor, "*n H"]:
    """What the head reads, in the dtype of matrix products."""
    return _norm(states, drafter.norm.weight, drafter.shape.rms_norm_eps, compute_dtype(states))


def heads_of(
    x: Float[Tensor, "n H"], e: Float[Tensor, "n width"], part: Part, matrices: Matrices, angles: Angles
) -> tuple[Float[Tensor, "n heads hd"], Float[Tensor, "n kv hd"], Float[Tensor, "n kv hd"]]:
    """Rotated queries and keys, and values, of a part; `e` is the embedding's half of it, and is used up."""
    return _Heads.apply(matrices.token, x, e, *angles, part, matrices.state)


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
    return _Finish.apply(
        matrices.token, h, attended.to(matrices.out.value.dtype), norm, drafter.shape.rms_norm_eps, matrices
    )


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, token: Tensor, x: Tensor, e: Tensor, cos: Tensor, sin: Tensor, part: Part, state: Matrix
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, cos, sin)
        ctx.part, ctx.state = part, state
        # The product is added to the other half before it is rounded.
        made = e.addmm_(x, state.value[part.rows].T).unflatten(-1, (-1, cos.shape[-1]))
        return _turned(cos, sin, *made.split(part.heads, dim=1))

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor | None, ...]:
        x, cos, sin = ctx.saved_tensors
        rows = ctx.part.rows
        gradient = _turned_back(cos, sin, query, key, value)
        ctx.state.add(gradient, x, rows)
        return None, gradient @ ctx.state.value[rows], gradient, None, None, None, None


class _Finish(torch.autograd.Function):
    """h' = h + out(attended);  h' + down(silu(gate(y)) * up(y)), y = norm(h')."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, h: Tensor, attended: Tensor, norm: Tensor, eps: float, matrices: Matrices
    ) -> Tensor:
        out, gate, up, down = matrices.out, matrices.gate, matrices.up, matrices.down
        middle, y = _added_and_normed(h, attended @ out.value.T, norm, eps)
        gates, ups = y @ gate.value.T, y @ up.value.T
        ctx.save_for_backward(attended, middle, y, gates, ups, norm)
        ctx.eps, ctx.matrices = eps, (out, gate, up, down)
        return _added(middle, _gated(gates, ups) @ down.value.T)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        attended, middle, y, gates, ups, norm = ctx.saved_tensors
        out, gate, up, down = ctx.matrices
        narrow = gradient.to(y.dtype)
        gated, of_gates, of_ups = _gated_back(narrow @ down.value, gates, ups)
        down.add(narrow, gated)
        gate.add(of_gates, y)
        up.add(of_ups, y)
        of_y = (of_gates @ gate.value).addmm_(of_ups, up.value)
        of_h, narrow, of_norm = _normed_back(gradient, middle, of_y, norm, ctx.eps)
        out.add(narrow, attended)
        return None, of_h, narrow @ out.value, of_norm, None, None


@compiled_on_gpu
def _norm(h: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return F.rms_norm(h.to(weight.dtype), h.shape[-1:], weight, eps).to(dtype)


@compiled_on_gpu
def _turned(cos: Tensor, sin: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _rotated(query, cos, sin), _rotated(key, cos, sin), value.clone()


@compiled_on_gpu
def _turned_back(cos: Tensor, sin: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.cat([_rotated(query, cos, -sin), _rotated(key, cos, -sin), value], dim=1).flatten(1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = at_least_float32(x)
    return (wide * cos[:, None] + rotate_half(wide) * sin[:, None]).to(x.dtype)


@compiled_on_gpu
def _added(h: Tensor, x: Tensor) -> Tensor:
    return h + x


@compiled_on_gpu
def _added_and_normed(h: Tensor, x: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    h = h + x
    return h, F.rms_norm(h, h.shape[-1:], norm, eps).to(x.dtype)


@compiled_on_gpu
def _normed_back(
    gradient: Tensor, h: Tensor, of_normed: Tensor, norm: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of h, which goes on beside its norm, in its own dtype and in that of products; and of the norm's weight."""
    dtype = of_normed.dtype
    scale = (h.square().mean(-1, keepdim=True) + eps).rsqrt()
    plain, of_normed = h * scale, of_normed.to(h.dtype)
    inner = of_normed * norm
    of_h = gradient + scale * (inner - plain * (inner * plain).mean(-1, keepdim=True))
    return of_h, of_h.to(dtype), (of_normed * plain).sum(0)


@compiled_on_gpu
def _gated(gates: Tensor, ups: Tensor) -> Tensor:
    return F.silu(gates) * ups


@compiled_on_gpu
def _gated_back(gradient: Tensor, gates: Tensor, ups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gates) * ups once more, and the gradients of both."""
    g, gate, up = at_least_float32(gradient), at_least_float32(gates), at_least_float32(ups)
    share = gate.sigmoid()
    silu = gate * share
    of_gate = g * up * (share + silu * (1.0 - share))
    return (silu * up).to(gates.dtype), of_gate.to(gates.dtype), (g * silu).to(gates.dtype)
