"""Training against decoding: a drafter that runs one row at a time from its own KV cache gives training's logits."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle3.decode import DraftCache
from eagle3.drafter import Eagle3Drafter
from tests.batches import Case, make_case


def one_row_at_a_time(case: Case, b: int, columns: Tensor, steps: int) -> Iterator[tuple[int, Tensor]]:
    """Every row r of a document, and the logits [steps, D] of its draft steps.

    `eagle3.decode.DraftCache` drafts from its own tokens. Here it is told the true ones instead, which training
    reads: a chain as serving has it once it was right so far.
    """
    drafter, batch = case.drafter, case.batch
    tokens, aux = batch["input_ids"][b, columns].tolist(), batch["aux"][b, columns]
    cache, logits = DraftCache(drafter, len(tokens) + steps), []
    hook = drafter.lm_head.register_forward_hook(lambda _, given, out: logits.append(out[0].detach()))
    drafter.target_ids = lambda _: torch.tensor(truth[len(logits) - 1])  # type: ignore[method-assign]
    try:
        for r in range(len(tokens) - 2):
            logits.clear()
            truth = tokens[r + 2 :][:steps]
            assert cache.draft(aux[r : r + 1], [tokens[r + 1]], len(truth)) == truth
            yield r, torch.stack(logits)
    finally:
        hook.remove()
        del drafter.target_ids  # type: ignore[attr-defined]


@pytest.mark.parametrize("new", [False, True], ids=["EAGLE-3", "EAGLE-3.1"])
@settings(max_examples=8)
@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 2), st.sampled_from([2, 6, 10]))
def test_decoding_row_by_row_gives_the_logits_of_training_at_every_step(
    new: bool, seed: int, steps: int, kv_heads: int, head_dim: int
):
    case = make_case(
        [[7, 1, 9], [3, 2, 11]], seed=seed, ttt_steps=steps, written=1.0, num_kv_heads=kv_heads, head_dim=head_dim,
        fc_norm=new, norm_output=new,
    )  # fmt: skip
    module, document = case.module(), case.batch["document"]
    taken: list[Tensor] = []

    def kept(drafter: Eagle3Drafter, states: Tensor) -> Tensor:
        taken.append(drafter.norm(states))
        return taken[-1]

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("eagle3.module.final_norm", kept)
        plan, _ = module(case.batch, case.batch["aux"])
        trained = torch.stack(taken) @ case.drafter.lm_head.weight.T  # K R D
    place, seen = {r: i for i, r in enumerate(plan.rows.tolist())}, 0
    for b in range(2):
        for number in range(3):
            columns = (document[b] == number).nonzero().squeeze(1)
            with torch.no_grad():
                for r, logits in one_row_at_a_time(case, b, columns, steps):
                    i = place[b * document.shape[1] + int(columns[r])]
                    assert plan.active[:, i].tolist() == [k < len(logits) for k in range(steps)]
                    torch.testing.assert_close(trained[: len(logits), i], logits, rtol=1e-4, atol=1e-5)
                    seen += len(logits)
    assert seen == int(plan.active.sum()) > 0
