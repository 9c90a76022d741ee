"""SGLang as a judge: asked as it is in earnest, by a fake that decodes with a drafter of its own, perhaps a liar."""

import json
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from fake_sglang import installed
from hypothesis import given
from hypothesis import strategies as st
from played_engine import played
from scripts import Script
from test_served import SETTINGS, ask, silent
from tiny_drafter import ORIGIN, PROMPTS, trained_drafter
from tiny_job import settings, write_inputs
from tiny_serve import ours, untrained_drafter
from transformers import AutoModelForCausalLM

from eagle3 import served
from eagle3.export.directory import load_drafter, save_drafter
from eagle3.gate import counts_of, inside_response
from eagle3.questions import ChatQuestions, FixedQuestions, Prompt
from eagle3.served_report import GateFailed, make_served_report
from eagle3.served_sglang import sglang_judges
from extract.chat import Chat
from extract.config import Capture, PhaseTimeouts, Server, Speculation
from extract.engines.sglang_answers import read_verifications
from extract.launcher import ServerDied, ServerError
from extract.prompts import read_conversations
from extract.verifier import load_tokenizer, resolve_verifier

K = SETTINGS.drafts
TIMEOUTS = PhaseTimeouts(**dict.fromkeys(("process", "distributed", "weights", "kv_cache", "graphs", "ready"), 30.0))


@pytest.fixture(scope="module")
def drafter(model):
    return trained_drafter(model)


@pytest.fixture(scope="module")
def whole(model, drafter):
    """What an engine without a fault says in its two lives."""
    return ask(played(model, drafter, K))


@pytest.fixture
def judges(model, drafter, whole, tmp_path):
    """Both servers, with faults of the fake; `settings` replaces those of the server."""
    directory = save_drafter(drafter, tmp_path / "drafter", dtype=torch.float32, origin=ORIGIN)
    spec = resolve_verifier(model.name_or_path, name="tiny", cache_dir=tmp_path, chat_template=None,
                            trust_remote_code=False)  # fmt: skip
    site, script = installed(tmp_path / "site"), tmp_path / "played.json"

    def made(faults="", answers=whole, **settings):
        script.write_text(json.dumps(script_of(answers)))
        spool = Capture(concurrency=1, flags={}, spool=str(tmp_path), spool_mib=1, phase_timeouts_s=TIMEOUTS)
        told = {
            "engine": "sglang", "python": sys.executable, "flags": {}, "start_timeout_s": 30.0, "urls": [],
            "request_timeout_s": 20.0, "replicas": 1, "capture": spool,
            "speculation": Speculation(steps=K, topk=1, draft_tokens=None),
            "env": {"PYTHONPATH": str(site), "FAKE": ",".join(filter(None, [f"played={script}", faults]))},
        }  # fmt: skip
        return sglang_judges(Server(**told | settings), spec, directory, K, dtype="float32", env={})

    yield made
    assert ours(tmp_path) == [] and not list(tmp_path.glob("eagle3-*")), "no server and no folder is left"


def script_of(answers):
    """What the fake plays. SGLang tells how many verifications accepted how many drafts, and not which."""

    def told(completion):
        counts = Counter(completion.accepted)
        return {"ids": list(completion.ids), "histogram": [counts[length] for length in range(K + 1)]}

    prompts = {str(list(a.prompt.ids)): a for a in answers.prompts}
    return {"alone": {key: told(a.plain) for key, a in prompts.items()},
            "drafted": {key: told(a.speculative) for key, a in prompts.items()}}  # fmt: skip


def answers_of(judges, folder):
    questions = FixedQuestions(Prompt(f"p{i}", 0, tuple(ids)) for i, ids in enumerate(PROMPTS))
    return served.answer(
        lambda with_drafter: judges.started(with_drafter, folder / str(with_drafter)), questions, SETTINGS,
        lambda prompts: None, silent,
    )  # fmt: skip


def report_of(model, drafter, answers):
    judged = served.judge(model, drafter, answers.prompts, SETTINGS)
    return make_served_report(f"SGLang {answers.version}", judged, answers.raw, find_suspects=list, drafts=K,
                              resamples=50, seed=0)  # fmt: skip


def test_three_counts_of_sglangs_own_text_agree(model, drafter, whole, judges, tmp_path):
    answers = answers_of(judges(), tmp_path)
    assert [a.speculative.ids for a in answers.prompts] == [a.speculative.ids for a in whole.prompts]
    assert all(a.plain.accepted == () and a.speculative.seconds > 0 for a in answers.prompts)
    assert answers.raw == whole.raw
    report = report_of(model, drafter, answers)
    report.verdict()
    engine, decoded, replayed = report.counts.values()
    assert report.engine_name == "SGLang 0.5.23" and engine.length > 1.5
    assert engine.length == decoded.length == replayed.length, "the sum inside the answers is exact"


def test_the_servers_are_started_as_chains_of_that_many_drafts(judges):
    two = judges(flags={"tp_size": 1}, speculation=Speculation(steps=7, topk=1, draft_tokens=None))
    alone, with_drafter = (" ".join(two.line(drafts).command) for drafts in (False, True))
    assert "speculative" not in alone and "--skip-tokenizer-init" in alone and "--tp-size 1" in alone
    for words in (f"num-steps {K} ", "eagle-topk 1 ", f"num-draft-tokens {K + 1} ", "algorithm EAGLE3 "):
        assert f"--speculative-{words}" in f"{with_drafter} "


@pytest.mark.parametrize("lie", ["hist", "count", "proposed", "length"])
def test_counters_that_lie_are_found_out(judges, tmp_path, lie):
    words = "do not make 24 tokens" if lie == "length" else "are not"
    with pytest.raises(ServerError, match=f"counts contradict each other: .*{words}"):
        answers_of(judges(f"lies={lie}"), tmp_path)


def test_no_counters_are_no_verifications_and_an_error(judges, tmp_path):
    with pytest.raises(ServerError, match="lacks counts of its drafts"):
        answers_of(judges("silent"), tmp_path)


def test_another_text_with_the_drafter_fails_the_gate(model, drafter, whole, judges, tmp_path):
    def changed(answer):
        return replace(answer, plain=replace(answer.plain, ids=(*answer.plain.ids[:5], 7, *answer.plain.ids[6:])))

    other = replace(whole, prompts=tuple(map(changed, whole.prompts)))
    report = report_of(model, drafter, answers_of(judges(answers=other), tmp_path))
    with pytest.raises(GateFailed, match=r"text: as without the drafter: p0: token 5, \d+ against 7"):
        report.verdict()


def test_counts_of_another_drafter_fail_the_gate(model, drafter, whole, judges, tmp_path):
    """Its text is right, and its counts fit the text: only the comparison can tell."""

    def slower(answer):
        accepted, left = [], len(answer.speculative.ids) - 1
        while left > 0:
            accepted.append(min(1, left - 1))
            left -= accepted[-1] + 1
        return replace(answer, speculative=replace(answer.speculative, accepted=tuple(accepted)))

    other = replace(whole, prompts=tuple(map(slower, whole.prompts)))
    with pytest.raises(GateFailed, match=r"engine: length"):
        report_of(model, drafter, answers_of(judges(answers=other), tmp_path)).verdict()


def test_layers_other_than_the_trained_ones_end_the_server(judges, tmp_path):
    with pytest.raises(ServerDied, match=r"trained on layers \[1, 2, 4\], and this SGLang gives it \[0, 1, 3\]"):
        answers_of(judges("captures=0,drafts"), tmp_path)


@pytest.mark.parametrize(
    ("faults", "error", "words"),
    [
        ("unwatched", ServerError, "0 of 1 ranks have said which layers"),
        ("steps=2,drafts", ServerError, "was to run with speculative_num_steps 3 and says 2"),
        ("version=0.5.16", ServerError, "was to run with version 0.5.23 and says 0.5.16"),
        ("dies", ServerDied, "out of memory"),
        ("dies_at=3,drafts", ServerDied, "SIGKILL"),
        ("cuts_at=2,drafts", ServerError, "broke off /generate"),
    ],
)
def test_a_server_that_is_not_as_it_was_asked_to_be_judges_nothing(judges, tmp_path, faults, error, words):
    with pytest.raises(error, match=words):
        answers_of(judges(faults), tmp_path)


def test_a_drafter_that_was_written_for_another_version_is_refused_before_a_server_starts(judges, tmp_path):
    directory = tmp_path / "drafter"
    judges()
    said = json.loads((directory / "config.json").read_text())
    said["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 2, 4]
    said["sglang_versions"] = ["0.5.16"]
    (directory / "config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"cannot be served by sglang:\n.*inputs of layers \[2, 3, 5\]"):
        judges()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"speculation": None}, "is no chain of drafts"),
        ({"speculation": Speculation(steps=3, topk=2, draft_tokens=6)}, r"use server\.speculation\.topk=1"),
        ({"replicas": 2}, "are for extract.py"),
        ({"flags": {"speculative_num_steps": 2}}, "set server.speculation"),
    ],
)
def test_what_cannot_be_judged_is_refused(judges, settings, words):
    with pytest.raises(ValueError, match=words):
        judges(**settings)


def test_an_sglang_without_plugins_is_refused(judges, tmp_path):
    made = judges()
    directory = next((tmp_path / "site").glob("sglang-*"))
    (directory / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.10.post1\n")
    with pytest.raises(ValueError, match=r"SGLang 0\.5\.10\.post1 takes no plugins"):
        sglang_judges(made.server, made.spec, made.drafter, K, dtype="float32", env={})


@contextmanager
def refused(words):
    with pytest.raises(ServerError, match=words):
        yield


def test_counts_of_a_server_without_a_drafter_are_refused():
    with refused("without a drafter it tells"):
        read_verifications({"meta_info": {"spec_verify_ct": 1}}, 4, None)
    assert read_verifications({"meta_info": {}}, 4, None) == read_verifications({"meta_info": {}}, 1, 3) == ()
    with refused("lacks counts"):
        read_verifications({"meta_info": {}}, 2, 3)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.data())
def test_a_histogram_is_as_good_as_the_order_but_for_one_verification(accepted, data):
    """Of any verifications, and an answer that ends anywhere in the last: the sum inside it is always exact."""
    reached = 1 + sum(accepted) + len(accepted)
    tokens = reached - data.draw(st.integers(0, accepted[-1]))
    counts = Counter(accepted)
    meta = {"spec_verify_ct": len(accepted), "spec_num_correct_drafts": sum(accepted),
            "spec_num_proposed_drafts": 4 * len(accepted),
            "spec_correct_drafts_histogram": [counts[n] for n in range(max(accepted) + 1)]}  # fmt: skip
    told = read_verifications({"meta_info": meta}, tokens, 4)
    assert sorted(told) == sorted(accepted)
    exact, guessed = (counts_of(inside_response(order, tokens), 4) for order in (accepted, told))
    assert guessed.verifications == exact.verifications and guessed.length == exact.length
    assert all(abs(a - b) <= 1 for a, b in zip(guessed.accepted, exact.accepted, strict=True))


def test_evaluate_says_what_sglang_counted_and_fails_with_a_drafter_that_is_too_weak(tmp_path):
    """The script itself; the fake plays what an engine with an untrained drafter would say."""
    write_inputs(tmp_path)
    drafter = untrained_drafter(tmp_path)
    words = settings(server="sglang", server__python=sys.executable, drafter_dir=drafter, evaluation__drafts=K,
                     evaluation__max_new_tokens=12, server__capture__spool=tmp_path)  # fmt: skip
    spec = resolve_verifier(str(tmp_path / "v"), name="tiny", cache_dir=tmp_path, chat_template=None,
                            trust_remote_code=False)  # fmt: skip
    chat = Chat(load_tokenizer(spec), spec.end_of_turn_ids, spec.vocab_size)
    conversations, _ = read_conversations(str(tmp_path / "e.jsonl"), split=None, limit=None, system_prompt=None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "v", dtype=torch.float32).eval()
    loaded = load_drafter(drafter, model.get_input_embeddings().weight.detach())
    limits = replace(SETTINGS, max_new_tokens=12, end_of_turn_ids=frozenset(spec.end_of_turn_ids))
    questions = ChatQuestions(conversations, chat, max_prompt=spec.max_position_embeddings - 12)
    answers = served.answer(played(model, loaded, K), questions, limits, lambda prompts: None, silent)
    (tmp_path / "played.json").write_text(json.dumps(script_of(answers)))
    site = installed(tmp_path / "site")
    words += [f"server.env.PYTHONPATH={site}", f"server.env.FAKE='played={tmp_path / 'played.json'}'"]
    done = Script("evaluate.py", *words, cwd=tmp_path).wait()
    assert done.code == 1 and "cannot be told to agree on this drafter" in done.output, done.output
    assert "counted: SGLang 0.5.23" in done.output
    (ledger,) = tmp_path.glob("outputs/evaluate/*/metrics.jsonl")
    row = json.loads(ledger.read_text().splitlines()[-1])["values"]
    assert row["verifications"] == answers.raw.verifications and row["accept_len_raw"] == answers.raw.length
    logs = {file.parent.name for file in ledger.parent.glob("*/server.log")}
    assert logs == {"sglang_alone", "sglang_with_drafter"} and ours(tmp_path) == []
