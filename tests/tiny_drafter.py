"""A tiny drafter that has learned its tiny verifier's texts by heart, so that decoding accepts drafts."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from eagle3.drafter import DrafterShape, Eagle3Drafter, initialise
from eagle3.export.config import Origin
from eagle3.replayed import capture
from eagle3.truth import plain_greedy
from eagle3.ttt import unroll
from eagle3.vocab import DraftVocab

LAYERS = (1, 2, 4)
PROMPTS = [[1, 7, 20, 31], [1, 90, 14, 5, 250, 33, 8], [1, 44], [1, 300, 2, 61, 61, 9, 12, 200, 7, 18]]

ORIGIN = Origin(
    verifier="tiny",
    verifier_family="llama",
    verifier_sha256="a" * 64,
    tokenizer_sha256="b" * 64,
    chat_template_sha256="c" * 64,
    end_of_turn_ids=(2,),
    ttt_steps=3,
    max_len=64,
)


def tiny_shape(model: PreTrainedModel, *, draft_vocab_size: int = 200, **changes: object) -> DrafterShape:
    """Heads of another width than hidden / heads, grouped keys, a scaled RoPE: nothing that defaults would hide."""
    config = model.config.get_text_config()
    values = {
        "hidden_size": config.hidden_size,
        "intermediate_size": 56,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "capture_layers": LAYERS,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
        "max_position_embeddings": config.max_position_embeddings,
    }
    return DrafterShape(**{**values, **changes})  # type: ignore[arg-type]


def tiny_drafter(model: PreTrainedModel, *, always: Sequence[int] = (), seed: int = 0, **changes) -> Eagle3Drafter:
    """Untrained; its vocabulary is a seeded choice that holds `always`, with target ids that are no draft ids."""
    shape = tiny_shape(model, **changes)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(shape.vocab_size, generator=generator)
    order = torch.cat([torch.tensor(list(always), dtype=torch.long), order[~torch.isin(order, torch.tensor(always))]])
    vocab = DraftVocab(order[: shape.draft_vocab_size].sort().values, shape.vocab_size, None)
    drafter = Eagle3Drafter(shape, vocab, model.get_input_embeddings().weight.data)
    initialise(drafter, model.get_output_embeddings().weight.data, seed)
    return drafter.eval()


def trained_drafter(
    model: PreTrainedModel,
    *,
    tokens: int = 24,
    steps: int = 16,
    ttt_steps: int = 3,
    norm_scale: float = 1.0,
    **changes,
) -> Eagle3Drafter:
    """Trained on the greedy answers to `PROMPTS` by plain cross-entropy; it drafts most of them, not all.

    Norms start uniform in (1 / norm_scale, norm_scale), so that a norm that is not read matters.
    """
    answers = plain_greedy(model, PROMPTS, max_new_tokens=tokens, end_of_turn_ids=())
    texts = [capture(model, p, a, LAYERS) for p, a in zip(PROMPTS, answers, strict=True)]
    texts = [type(t)(t.prompt_tokens, t.input_ids, t.aux.clone(), t.logits.clone()) for t in texts]
    drafter = tiny_drafter(model, always=sorted({t for a in answers for t in a}), **changes).train()
    generator = torch.Generator().manual_seed(1)
    for module in drafter.modules():
        if isinstance(module, torch.nn.RMSNorm):
            spread = torch.rand(module.weight.shape, generator=generator) * 2 - 1
            module.weight.data *= norm_scale**spread
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = torch.zeros(())
        for text in texts:
            plan = text.plan(drafter, ttt_steps)
            document = torch.zeros_like(text.input_ids)[None]
            position = torch.arange(len(text.input_ids))
            states = torch.stack(unroll(drafter, text.aux, text.input_ids, position, document, plan.rows, plan.index))
            logits = drafter.lm_head(drafter.norm(states))[plan.active]
            draft_ids = drafter.t2d.cumsum(0)[plan.target[plan.active]] - 1
            loss = loss + torch.nn.functional.cross_entropy(logits, draft_ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval().requires_grad_(False)
