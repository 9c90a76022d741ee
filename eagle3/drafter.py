"""The EAGLE-3 drafter network (Li et al. 2025, arXiv:2503.01840): one decoder layer over the verifier's hidden states.

    h0 = fc(aux)                                          aux: A captured layers of the verifier, concatenated
    q, k, v read cat(input_layernorm(e), hidden_norm(h))  e: the verifier's embedding of the next token, frozen
    h' = h + attention;  h' = h' + mlp(post_attention_layernorm(h'))
    logits = lm_head(norm(h'));  the next step is fed h' (EAGLE-3.1: norm(h'))

Module names are the tensor names of the drafter directory, so that `state_dict()` is what engines load.
Legend: H hidden, A captured layers, V verifier vocabulary, D draft vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3.precision import compute_dtype
from eagle3.vocab import DraftVocab


@dataclass(frozen=True)
class DrafterShape:
    """Everything that fixes the network, and nothing else. Written to and read from the drafter's config.json."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    capture_layers: tuple[int, ...]
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    """New-style RoPE (`rope_theta`, `rope_type`, scaling): the one place for training, export and decoding."""
    max_position_embeddings: int
    fc_norm: bool = False
    """EAGLE-3.1: one RMSNorm per captured layer before `fc`."""
    norm_output: bool = False
    """EAGLE-3.1: the next step is fed the normed state instead of the residual stream."""


class SelfAttention(nn.Module):
    """Projections over cat(embedding, hidden): 2H wide in, so that each weight has an embedding and a hidden half."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        wide = 2 * shape.hidden_size
        self.q_proj = nn.Linear(wide, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(wide, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(wide, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)


class Midlayer(nn.Module):
    def __init__(self, shape: DrafterShape):
        super().__init__()
        norm = lambda: nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)  # noqa: E731
        self.input_layernorm = norm()
        self.hidden_norm = norm()
        self.post_attention_layernorm = norm()
        self.self_attn = SelfAttention(shape)
        self.mlp = Mlp(shape)


class Eagle3Drafter(nn.Module):
    """Parameters, and what comes before and after the layer; `eagle3.step` is the layer itself."""

    d2t: Tensor
    t2d: Tensor
    embedding: Tensor

    def __init__(self, shape: DrafterShape, vocab: DraftVocab, embedding: Float[Tensor, "V H"]):
        """`embedding` is the verifier's table; it is frozen and is no part of the checkpoint."""
        super().__init__()
        if embedding.shape != (shape.vocab_size, shape.hidden_size):
            raise ValueError(
                f"the verifier's embedding is {tuple(embedding.shape)}, the drafter expects "
                f"({shape.vocab_size}, {shape.hidden_size}); is verifier.path the model that the store was made with?"
            )
        self.shape = shape
        layers = len(shape.capture_layers)
        if shape.fc_norm:
            norms = [nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps) for _ in range(layers)]
            self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(layers * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = Midlayer(shape)
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.register_buffer("d2t", vocab.d2t.clone())
        self.register_buffer("t2d", vocab.t2d.clone())
        self.register_buffer("embedding", embedding, persistent=False)
        self.rotary = LlamaRotaryEmbedding(_rope_config(shape))

    def fuse(self, aux: Float[Tensor, "*n AH"]) -> Float[Tensor, "*n H"]:
        """h0: the captured layers, each normed first if `fc_norm`, brought to one hidden state."""
        if self.shape.fc_norm:
            layers = aux.to(self.fc.weight.dtype).chunk(len(self.fc_norm), dim=-1)
            aux = torch.cat([norm(x) for norm, x in zip(self.fc_norm, layers, strict=True)], dim=-1)
        # The residual stream stays in the weights' precision; under autocast only matrix products are narrower.
        return self.fc(aux.to(compute_dtype(self.fc.weight))).to(self.fc.weight.dtype)

    def feed(self, h: Float[Tensor, "*n H"]) -> Float[Tensor, "*n H"]:
        """What the next step is fed."""
        return self.norm(h) if self.shape.norm_output else h

    def target_ids(self, draft_ids: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """Draft-vocabulary ids to the verifier's ids."""
        return draft_ids + self.d2t[draft_ids]


def _rope_config(shape: DrafterShape) -> LlamaConfig:
    # Of one head: a rotation reads no more, and a LlamaConfig refuses heads that do not divide the hidden size.
    return LlamaConfig(
        hidden_size=shape.head_dim,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters=dict(shape.rope_parameters),
    )


def initialise(drafter: Eagle3Drafter, head: Float[Tensor, "V H"], seed: int) -> None:
    """Fresh weights: `lm_head` starts from the verifier's rows of the draft vocabulary, the rest is normal(0, 0.02)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in drafter.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, 0.02, generator=generator)
            elif isinstance(module, nn.RMSNorm):
                module.weight.fill_(1.0)
        drafter.lm_head.weight.copy_(head[drafter.t2d.nonzero().squeeze(1)])
