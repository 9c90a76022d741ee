"""Tests of eagle3.supervision: the row sets A_k and M_k against hand-made lists and their definition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eagle3.supervision import row_counts, supervise

VOCAB = 12
ALL = torch.ones(VOCAB, dtype=torch.bool)


def packed(*rows: str) -> dict[str, Tensor]:
    """One string a packed row: `.` prompt token, `a` written by the assistant, `|` the next document, `_` padding."""
    size = (len(rows), max(len(row.replace("|", "")) for row in rows))
    document = torch.full(size, -1, dtype=torch.int32)
    mask = torch.zeros(size, dtype=torch.bool)
    for b, row in enumerate(rows):
        tokens = [(number, token) for number, text in enumerate(row.split("|")) for token in text]
        for t, (number, token) in enumerate(tokens):
            document[b, t] = -1 if token == "_" else number
            mask[b, t] = token == "a"
    ids = torch.arange(size[0] * size[1]).reshape(size) % VOCAB
    return {"input_ids": ids, "loss_mask": mask, "document": document, "top1": (ids + 1) % VOCAB}


def active(*rows: str, ttt_steps: int = 3) -> list[list[int]]:
    """A_0, A_1, … as lists of flat rows."""
    plan = supervise(**packed(*rows), in_draft_vocab=ALL, ttt_steps=ttt_steps)
    return [plan.rows[here].tolist() for here in plan.active]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        # One token: nothing is left to draft after it.
        ("...a", [[], [], []]),
        ("a...", [[], [], []]),
        (".a..", [[], [], []]),
        # Two tokens: the row before the reply reads its first token and drafts the second.
        ("..aa", [[1], [], []]),
        (".aa.", [[0], [], []]),
        ("aa..", [[], [], []]),
        # Three tokens.
        ("..aaa", [[1, 2], [1], []]),
        (".aaa.", [[0, 1], [0], []]),
        ("aaa..", [[0], [], []]),
        # A longer one: the token after end-of-turn is drafted by nobody.
        ("..aaaaa..", [[1, 2, 3, 4], [1, 2, 3], [1, 2]]),
        # Documents of length 1, 2 and 3.
        ("a", [[], [], []]),
        ("aa", [[], [], []]),
        (".aa", [[0], [], []]),
        ("aaa", [[0], [], []]),
        # Several turns: no row drafts over the prompt between two replies.
        ("..aaa.aa", [[1, 2, 5], [1], []]),
        (".aa.aaa..aaaa", [[0, 3, 4, 8, 9, 10], [3, 8, 9], [8]]),
        # A cut reply is trained as far as it goes.
        ("..aaaa", [[1, 2, 3], [1, 2], [1]]),
        # Padding adds nothing.
        ("..aaa___", [[1, 2], [1], []]),
        ("________", [[], [], []]),
    ],
)
def test_hand_made_replies(text: str, want: list[list[int]]):
    assert active(text) == want


def test_first_draft_of_a_reply_is_in_and_reads_its_first_token():
    plan = supervise(**packed("..aaa"), in_draft_vocab=ALL, ttt_steps=2)
    assert plan.rows.tolist() == [1, 2]
    assert plan.index[0].tolist() == [2, 3]
    assert plan.target[0].tolist() == [3, 4]
    assert plan.top1[0].tolist() == [3, 4]
    assert (plan.index[1, 0], plan.target[1, 0]) == (3, 4)


def test_no_row_drafts_into_the_next_document_or_packed_row():
    assert active("..aa|aaaa") == [[1, 4, 5], [4], []]
    assert active("aaaa|aa|a|aaa") == [[0, 1, 7], [0], []]
    assert active("..aa", "aaaa") == [[1, 4, 5], [4], []]


def test_written_padding_is_padding():
    batch = packed("..aa____")
    batch["loss_mask"][:] = True
    plan = supervise(**batch, in_draft_vocab=ALL, ttt_steps=3)
    assert plan.rows.tolist() == [0, 1] and plan.active[1].tolist() == [True, False]


def test_row_without_a_draftable_top1_stays_active_and_is_not_supervised():
    batch = packed("..aaaa")
    drafted = ALL.clone()
    drafted[batch["top1"][0, 3]] = False
    plan = supervise(**batch, in_draft_vocab=drafted, ttt_steps=2)
    assert plan.active.tolist() == [[True, True, True], [True, True, False]]
    assert plan.supervised.tolist() == [[True, False, True], [False, True, False]]
    nothing = supervise(**batch, in_draft_vocab=~ALL, ttt_steps=2)
    assert torch.equal(nothing.active, plan.active) and not nothing.supervised.any()


def test_counts_do_not_depend_on_prompt_padding_or_packing():
    texts = ["." * 5 + "aaaaa", "." * 200 + "aaaaa", "." * 5 + "aaaaa" + "_" * 50, "..a|" + "." * 5 + "aaaaa|."]
    for text in texts:
        in_a, in_m = row_counts(**packed(text), in_draft_vocab=ALL, ttt_steps=3)
        assert in_a.tolist() == in_m.tolist() == [[4, 3, 2]], text


@st.composite
def texts(draw: st.DrawFn) -> list[str]:
    documents = st.text(alphabet=".aaa", min_size=1, max_size=8)
    rows = draw(st.lists(st.lists(documents, max_size=4).map("|".join), min_size=1, max_size=3))
    return [row + "_" * draw(st.integers(0, 2)) for row in [*rows[:-1], rows[-1] + "_"]]


@given(texts(), st.integers(1, 7), st.sets(st.integers(0, VOCAB - 1)), st.integers(0, 100))
def test_row_sets_are_their_definition(rows: list[str], ttt_steps: int, drafted: set[int], seed: int):
    batch = packed(*rows)
    batch["top1"] = torch.randint(VOCAB, batch["top1"].shape, generator=torch.Generator().manual_seed(seed))
    in_draft_vocab = torch.tensor([token in drafted for token in range(VOCAB)])
    plan = supervise(**batch, in_draft_vocab=in_draft_vocab, ttt_steps=ttt_steps)
    count, tokens = batch["document"].shape
    ids, top1 = batch["input_ids"].flatten(), batch["top1"].flatten()
    counted: dict[str, list[list[int]]] = {n: [[0] * ttt_steps for _ in rows] for n in ("active", "supervised")}
    slot = {row: i for i, row in enumerate(plan.rows.tolist())}
    assert list(slot) == sorted(slot)
    for b in range(count):
        for r in range(tokens):
            for k in range(ttt_steps):
                # In A_k: x[r] … x[r+2+k] in one document, x[r+1] … x[r+2+k] written by the assistant.
                span = range(r, r + 3 + k)
                inside = span[-1] < tokens and all(
                    batch["document"][b, t] == batch["document"][b, r] != -1 for t in span
                )
                in_a = inside and all(bool(batch["loss_mask"][b, t]) for t in span[1:])
                i = slot.get(b * tokens + r)
                assert (i is not None and bool(plan.active[k, i])) == in_a
                if not in_a:
                    assert i is None or not plan.supervised[k, i]
                    continue
                assert i is not None
                at = b * tokens + r + 1 + k
                in_m = int(top1[at]) in drafted
                assert bool(plan.supervised[k, i]) == in_m
                assert (plan.index[k, i], plan.target[k, i], plan.top1[k, i]) == (at, ids[at + 1], top1[at])
                counted["active"][b][k] += 1
                counted["supervised"][b][k] += in_m
    assert plan.active[0].all(), "rows holds A_0 and nothing else"
    assert not (plan.active[1:] & ~plan.active[:-1]).any(), "A_{k+1} is part of A_k"
    in_a, in_m = row_counts(**batch, in_draft_vocab=in_draft_vocab, ttt_steps=ttt_steps)
    assert {"active": in_a.tolist(), "supervised": in_m.tolist()} == counted
