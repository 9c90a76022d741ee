"""Losses of one (row, step), each with its gradient in the draft's logits, for the head to form at once.

    p   the verifier at this position, over its full vocabulary     q = softmax(logits), 0 outside the draft vocabulary
    t   p restricted to the draft vocabulary and normalised again   alpha = sum_v min(p_v, q_v)

alpha is the chance that speculative sampling accepts the draft (Leviathan et al. 2023, arXiv:2211.17192, 3.2), and
1 - alpha is the total variation distance of p and q. Sums run over the draft vocabulary; outside it the minimum is 0.
A row of weight 0 gives a finite loss and no gradient, whatever its teacher says.
Legend: P pairs (k, r), D draft vocabulary.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

RowLoss = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits [P, D], t [P, D], mass [P], weight [P]) -> (loss [P], weight times the gradient [P, D]).

`mass` is how much of p lies in the draft vocabulary, so that p is t * mass there. Arguments are left as they are.
"""

LK_DECAY = 3.0
"""eta of the hybrid LK loss: how fast the weight of the cross-entropy falls as alpha rises (arXiv:2602.23881, 4.4)."""


def soft_cross_entropy(
    logits: Float[Tensor, "P D"], teacher: Float[Tensor, "P D"], mass: Float[Tensor, "P"], weight: Float[Tensor, "P"]
) -> tuple[Float[Tensor, "P"], Float[Tensor, "P D"]]:
    """- sum_v t_v log q_v; its gradient is q - t. Source: EAGLE-3, arXiv:2503.01840, section 3."""
    log_z = logits.logsumexp(-1)
    row_loss = log_z - torch.linalg.vecdot(teacher, logits)
    gradient = (logits - log_z[:, None]).exp_().sub_(teacher).mul_(weight[:, None])
    return row_loss, gradient


def total_variation(
    logits: Float[Tensor, "P D"], teacher: Float[Tensor, "P D"], mass: Float[Tensor, "P"], weight: Float[Tensor, "P"]
) -> tuple[Float[Tensor, "P"], Float[Tensor, "P D"]]:
    """1 - alpha. Its gradient fades where p and q hardly overlap: for a warm start. Source: arXiv:2602.23881."""
    alpha, gradient = _overlap(logits, teacher, mass)
    return 1.0 - alpha, gradient.mul_(-weight[:, None])


def lk_alpha(
    logits: Float[Tensor, "P D"], teacher: Float[Tensor, "P D"], mass: Float[Tensor, "P"], weight: Float[Tensor, "P"]
) -> tuple[Float[Tensor, "P"], Float[Tensor, "P D"]]:
    """- log alpha: total variation with a gradient 1/alpha times as large. Source: arXiv:2602.23881.

    In logarithms, for alpha may be smaller than any float. With m_v = [q_v < p_v] and s_v = m_v min(p_v, q_v)/alpha
    the gradient is q sum(s) - s.
    """
    log_q = logits.log_softmax(-1)
    tiny = torch.finfo(mass.dtype).tiny
    log_p = teacher.log().add_(mass.clamp(min=tiny).log()[:, None])
    smaller = torch.minimum(log_p, log_q)
    log_alpha = smaller.logsumexp(-1)
    share = smaller.sub_(log_alpha[:, None]).exp_().mul_(log_q < log_p)
    gradient = log_q.exp_().mul_(share.sum(-1, keepdim=True)).sub_(share).mul_(weight[:, None])
    return -log_alpha, gradient


def lk_lambda(
    logits: Float[Tensor, "P D"], teacher: Float[Tensor, "P D"], mass: Float[Tensor, "P"], weight: Float[Tensor, "P"]
) -> tuple[Float[Tensor, "P"], Float[Tensor, "P D"]]:
    """g CE + (1 - g)(1 - alpha), g = exp(-LK_DECAY alpha), with no gradient through g. Source: arXiv:2602.23881, 4.2.

    Here g belongs to each row, where the paper takes the mean alpha of a batch: so it depends on no other row, and
    any spread of rows over micro-batches and processes gives the same step.
    """
    alpha, gradient = _overlap(logits, teacher, mass)
    g = torch.exp(-LK_DECAY * alpha)
    cross_entropy, of_cross_entropy = soft_cross_entropy(logits, teacher, mass, weight * g)
    gradient = of_cross_entropy.sub_(gradient.mul_((weight * (1.0 - g))[:, None]))
    return g * cross_entropy + (1.0 - g) * (1.0 - alpha), gradient


def _overlap(
    logits: Float[Tensor, "P D"], teacher: Float[Tensor, "P D"], mass: Float[Tensor, "P"]
) -> tuple[Float[Tensor, "P"], Float[Tensor, "P D"]]:
    """alpha and its gradient: q_v ([q_v < p_v] - sum of all q_u < p_u)."""
    q, p = logits.softmax(-1), teacher * mass[:, None]
    rising = torch.where(q < p, q, 0.0)
    alpha = torch.minimum(p, q).sum(-1)
    return alpha, rising - q.mul_(rising.sum(-1, keepdim=True))


LOSSES: dict[str, RowLoss] = {
    "soft_ce": soft_cross_entropy,
    "lk_alpha": lk_alpha,
    "lk_lambda": lk_lambda,
    "tv": total_variation,
}
"""By the name that `drafter.loss` gives them."""
