"""The maths of a training step written out plainly: dense masks, one document at a time, one row at a time.

Written from the definition of the network and of its row sets, not from the code it is compared with; nothing here
comes from `eagle3`. It computes in the dtype of the weights, so that a float64 run can judge a float32 one.

At TTT step k, row r of a document reads its token x[r+1+k] and predicts x[r+2+k]. The teacher is the verifier's
softmax at r+1+k, over the draft vocabulary. A_k: x[r+1] … x[r+2+k] exist and were all written by the assistant.
M_k: A_k where the verifier's top-1 can be drafted.   loss = sum_k decay^k * sum over M_k of L / |M_k|, L: `row_loss`
Legend: n tokens of a document, K steps, H hidden, V verifier vocabulary, D draft vocabulary.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Network:
    """A drafter as plain tensors and numbers."""

    weights: dict[str, Tensor]
    """By the names of the drafter directory."""
    head_dim: int
    eps: float
    theta: float
    fc_norm: bool
    norm_output: bool


@dataclass(frozen=True)
class Verifier:
    embedding: Tensor
    """[V, H]"""
    head: Tensor
    """[V, H]"""


@dataclass(frozen=True)
class Document:
    """One document of a packed row, cut out: nothing else of the batch can reach it."""

    tokens: list[int]
    written: list[bool]
    position: Tensor
    aux: Tensor
    last: Tensor
    greedy: bool


@dataclass
class Result:
    loss: Tensor
    metrics: dict[str, float]


@dataclass
class _Tally:
    """Everything that is counted at one step k over all documents."""

    loss: list[Tensor] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    chain: list[bool] = field(default_factory=list)
    acc_top1: list[bool] = field(default_factory=list)
    alpha: list[float] = field(default_factory=list)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """RoPE on x [n, heads, head_dim]: pairs are (i, i + head_dim/2), as in Llama."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = position.to(x.dtype)[:, None, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def fused(net: Network, aux: Tensor) -> Tensor:
    """h0 [n, H]: fc over the captured layers, each normed first where the network says so."""
    hidden = net.weights["norm.weight"].numel()
    layers = aux.split(hidden, dim=-1)
    if net.fc_norm:
        layers = [rms_norm(x, net.weights[f"fc_norm.{i}.weight"], net.eps) for i, x in enumerate(layers)]
    return torch.cat(list(layers), dim=-1) @ net.weights["fc.weight"].T


def unrolled(
    net: Network, verifier: Verifier, aux: Tensor, position: Tensor, reads: list[Tensor], visible: Tensor
) -> list[Tensor]:
    """The layer's output [n, H] at every step, before the final norm.

    `reads[k]` are the tokens [n] that the rows read at step k; `visible` [n, n] says which step-0 keys a row attends
    to. Of later steps it attends to its own keys.
    """
    w = {name.removeprefix("midlayer."): tensor for name, tensor in net.weights.items()}
    n = len(aux)
    h = fused(net, aux)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    mask: list[Tensor] = []
    out = []
    for k, read in enumerate(reads):
        e = rms_norm(verifier.embedding[read], w["input_layernorm.weight"], net.eps)
        both = torch.cat([e, rms_norm(h, w["hidden_norm.weight"], net.eps)], dim=-1)
        q, key, value = (
            (both @ w[f"self_attn.{name}_proj.weight"].T).reshape(n, -1, net.head_dim) for name in ("q", "k", "v")
        )
        q, key = (rotate(x, position + k, net.theta) for x in (q, key))
        group = q.shape[1] // key.shape[1]
        keys.append(key.repeat_interleave(group, dim=1))
        values.append(value.repeat_interleave(group, dim=1))
        mask.append(visible if k == 0 else torch.eye(n, dtype=torch.bool))
        score = torch.einsum("rhd,jhd->hrj", q, torch.cat(keys)) / math.sqrt(net.head_dim)
        weight = score.masked_fill(~torch.cat(mask, dim=1), -math.inf).softmax(-1)
        attended = torch.einsum("hrj,jhd->rhd", weight, torch.cat(values)).reshape(n, -1)
        h = h + attended @ w["self_attn.o_proj.weight"].T
        y = rms_norm(h, w["post_attention_layernorm.weight"], net.eps)
        gate, up = y @ w["mlp.gate_proj.weight"].T, y @ w["mlp.up_proj.weight"].T
        h = h + (gate * gate.sigmoid() * up) @ w["mlp.down_proj.weight"].T
        out.append(h)
        if net.norm_output:
            h = rms_norm(h, w["norm.weight"], net.eps)
    return out


def states(net: Network, verifier: Verifier, document: Document, steps: int) -> list[Tensor]:
    """The states of a document's rows at every step. Rows that read past the end mean nothing."""
    row, tokens = torch.arange(len(document.tokens)), torch.tensor(document.tokens)
    reads = [tokens[(row + 1 + k).clamp(max=len(row) - 1)] for k in range(steps)]
    return unrolled(net, verifier, document.aux, document.position, reads, row[:, None] >= row)


def head(net: Network, state: Tensor) -> Tensor:
    """Logits [n, D] of states [n, H]."""
    return rms_norm(state, net.weights["norm.weight"], net.eps) @ net.weights["lm_head.weight"].T


def row_loss(kind: str, logits: Tensor, verdict: Tensor, target_ids: Tensor) -> Tensor:
    """The loss of a row with draft logits [D], against the verifier's logits [V] over its whole vocabulary."""
    p, q = verdict.softmax(-1)[target_ids], logits.softmax(-1)
    alpha = torch.minimum(p, q).sum()
    cross_entropy = -(verdict[target_ids].softmax(-1) * logits.log_softmax(-1)).sum()
    g = torch.exp(-3.0 * alpha.detach())
    return {
        "soft_ce": cross_entropy,
        "tv": 1 - alpha,
        "lk_alpha": -alpha.log(),
        "lk_lambda": g * cross_entropy + (1 - g) * (1 - alpha),
    }[kind]


def documents(batch: dict[str, Tensor]) -> Iterator[Document]:
    """Cuts a packed batch [B, T] into its documents; padding is dropped."""
    for b, numbers in enumerate(batch["document"].tolist()):
        for number in sorted(set(numbers) - {-1}):
            at = [t for t, other in enumerate(numbers) if other == number]
            yield Document(
                tokens=batch["input_ids"][b, at].tolist(),
                written=batch["loss_mask"][b, at].tolist(),
                position=batch["position"][b, at],
                aux=batch["aux"][b, at],
                last=batch["last"][b, at],
                greedy=bool(batch["greedy"][b, at[0]]),
            )


def is_active(written: list[bool], r: int, k: int) -> bool:
    """Whether row r belongs to A_k."""
    return r + 2 + k < len(written) and all(written[r + 1 : r + 3 + k])


def replay(document: Document, right: dict[tuple[int, int], bool], steps: int) -> list[int]:
    """The number of drafts accepted at each verification of a greedy serving of the document's responses."""
    accepted = []
    w = document.written
    for first in range(len(w)):
        if w[first] and (first == 0 or not w[first - 1]):
            end = first
            while end + 1 < len(w) and w[end + 1]:
                end += 1
            # A response that begins a document has no row that reads its first token.
            r = max(first - 1, 0)
            while r + 1 < end:
                a = 0
                while a < steps and right.get((r, a), False):
                    a += 1
                accepted.append(a)
                r += a + 1
    return accepted


def train_step(
    net: Network,
    verifier: Verifier,
    target_ids: Tensor,
    batch: dict[str, Tensor],
    *,
    steps: int,
    decay: float,
    kind: str = "soft_ce",
) -> Result:
    """Loss, differentiable in `net.weights` and `batch["aux"]`, and every metric of one optimizer step."""
    tallies = [_Tally() for _ in range(steps)]
    accepted: list[int] = []
    for document in documents(batch):
        right = _draft(net, verifier, target_ids, document, tallies, kind)
        if document.greedy:
            accepted += replay(document, right, steps)
    loss = torch.zeros((), dtype=verifier.head.dtype)
    for k, tally in enumerate(tallies):
        if tally.loss:
            loss = loss + decay**k * torch.stack(tally.loss).sum() / len(tally.loss)
    metrics = _metrics(tallies) | {"loss": loss.item(), "visited": len(accepted)}
    metrics |= {f"accepted_{k}": sum(a > k for a in accepted) for k in range(steps)}
    if accepted:
        metrics["accept_len"] = 1 + sum(accepted) / len(accepted)
    return Result(loss, metrics)


def _draft(
    net: Network, verifier: Verifier, target_ids: Tensor, document: Document, tallies: list[_Tally], kind: str
) -> dict[tuple[int, int], bool]:
    """Adds every active (row, step) of a document to the tallies; returns which of them were right."""
    right: dict[tuple[int, int], bool] = {}
    verdict = document.last @ verifier.head.T
    for k, state in enumerate(states(net, verifier, document, len(tallies))):
        logits = head(net, state)
        for r in range(len(document.tokens)):
            if not is_active(document.written, r, k):
                continue
            speaks = verdict[r + 1 + k]
            draft = int(target_ids[logits[r].argmax()])
            right[r, k] = draft == document.tokens[r + 2 + k]
            tally = tallies[k]
            tally.right.append(right[r, k])
            tally.chain.append(all(right[r, i] for i in range(k + 1)))
            tally.acc_top1.append(draft == int(speaks.argmax()))
            p, q = speaks.softmax(-1)[target_ids], logits[r].softmax(-1)
            tally.alpha.append(torch.minimum(p, q).sum().item())
            if int(speaks.argmax()) in target_ids.tolist():
                tally.loss.append(row_loss(kind, logits[r], speaks, target_ids))
    return right


def _metrics(tallies: list[_Tally]) -> dict[str, float]:
    """Rates over A_k, losses over M_k; what has an empty denominator is absent."""
    out: dict[str, float] = {}
    for k, tally in enumerate(tallies):
        if tally.loss:
            out[f"loss_{k}"] = torch.stack(tally.loss).mean().item()
        if active := len(tally.right):
            out[f"acc_{k}"] = sum(tally.right) / active
            out[f"chain_{k}"] = sum(tally.chain) / active
            out[f"acc_top1_{k}"] = sum(tally.acc_top1) / active
            out[f"alpha_{k}"] = sum(tally.alpha) / active
    if tallies[0].right:
        out["coverage"] = len(tallies[0].loss) / len(tallies[0].right)
        out["accept_len_all_rows"] = 1 + sum(out.get(f"chain_{k}", 0.0) for k in range(len(tallies)))
    return out
