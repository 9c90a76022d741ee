"""Answering: every turn once, in the verifier's own history, in any number of attempts."""

import multiprocessing
import os
import signal
from dataclasses import dataclass

import pytest
import torch

from extract import respond as respond_module
from extract.chat import Chat
from extract.engines import EngineError, Generated, InProcessEngine
from extract.journal import Journal
from extract.prompts import Conversation
from extract.respond import Answered, Sampling, count_turns, plan_batches, respond
from extract.retry import Patience
from extract.verifier import load_tokenizer, resolve_verifier
from tests.tiny import tiny_tokenizer, tiny_verifier

GREEDY = Sampling(max_new_tokens=6, temperature=0.0, top_p=1.0, seed=0)
SAMPLED = Sampling(max_new_tokens=6, temperature=1.0, top_p=0.95, seed=3)
STOP = 2


class EchoEngine:
    """Answers with two letters that depend on the prompt, then the end of turn; fails where it is told to."""

    name, version = "echo", "0"

    def __init__(self, fails=lambda prompt: False):
        self.fails = fails
        self.prompts, self.batches = [], []

    def capture(self, batch):
        raise NotImplementedError

    def generate(self, batch, *, max_new_tokens, temperature, top_p, seed, stop_ids):
        assert STOP in stop_ids
        self.batches.append((len(batch), seed, max_new_tokens))
        for prompt in batch:
            if self.fails(prompt):
                raise EngineError("no answer")
        self.prompts += batch
        return [Generated([70 + sum(p) % 20, 70 + len(p) % 20, STOP], "stop") for p in batch]

    def close(self):
        pass


@pytest.fixture(scope="module")
def chat():
    return Chat(tiny_tokenizer(), end_of_turn_ids=(STOP,), vocab_size=320)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    path = tiny_verifier(tmp_path_factory.mktemp("verifier") / "v")
    spec = resolve_verifier(str(path), name="tiny", cache_dir=path, chat_template=None, trust_remote_code=False)
    engine = InProcessEngine(spec, capture_layers=(1, 3, 6), dtype=torch.float32, device="cpu")
    return engine, Chat(load_tokenizer(spec), spec.end_of_turn_ids, spec.vocab_size)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def conversation(name, *messages, tools=None):
    return Conversation(id=name, messages=messages, tools=tools)


def several(count=40):
    """Conversations of different lengths, every fourth with three turns, every fifth with a system."""
    made = []
    for i in range(count):
        turns = [user("word " * (1 + (7 * i) % 11) + str(i)) for _ in range(3 if i % 4 == 0 else 1)]
        system = [{"role": "system", "content": "Be brief."}] if i % 5 == 0 else []
        made.append(conversation(f"c{i}", *system, *turns))
    return made


@dataclass
class Outcome:
    events: list[Answered]
    records: dict

    @property
    def skipped(self):
        return [skipped for event in self.events for skipped in event.skipped]


def run(engine, chat, conversations, path, **changes):
    options = {"sampling": GREEDY, "verifier_sha256": "abc", "max_len": 400, "batch_size": 8}
    with Journal(path) as journal:
        events = list(respond(engine, chat, conversations, journal, **(options | changes)))
        return Outcome(events, {(r["id"], r["turn"]): r for r in journal.records()})


def test_every_turn_is_answered_once_and_counted(tmp_path, chat):
    conversations, engine = several(), EchoEngine()
    outcome = run(engine, chat, conversations, tmp_path / "r.jsonl")
    assert len(outcome.records) == count_turns(conversations, keep_given=False) == 60
    assert sum(event.turns for event in outcome.events) == 60 and len(engine.prompts) == 60
    assert sum(event.response_tokens for event in outcome.events) == 180
    assert sum(event.prompt_tokens for event in outcome.events) == sum(map(len, engine.prompts))
    assert not outcome.skipped and not any(event.reused for event in outcome.events)
    record = outcome.records["c0", 0]
    assert record["prompt_ids"] == chat.prompt_ids(conversations[0].messages[:2])
    assert record["source"] == "generated" and record["finish_reason"] == "stop"
    assert record["response_ids"][-1] == STOP and record["verifier_sha256"] == "abc"


def test_a_later_turn_reads_the_verifiers_own_answers(tmp_path, real):
    engine, chat = real
    asked = [user("What is the capital of France?"), user("And of Spain?"), user("Why?")]
    outcome = run(engine, chat, [conversation("c", *asked)], tmp_path / "r.jsonl")
    history = []
    for turn, message in enumerate(asked):
        history.append(message)
        record = outcome.records["c", turn]
        assert record["prompt_ids"] == chat.prompt_ids(history)
        (wanted,) = engine.generate(
            [record["prompt_ids"]], max_new_tokens=6, temperature=0.0, top_p=1.0, seed=0, stop_ids=(STOP,)
        )
        assert (record["response_ids"], record["finish_reason"]) == (wanted.ids, wanted.finish_reason)
        text = chat.tokenizer.decode([i for i in wanted.ids if i != STOP])
        history.append(assistant(text))


def test_batches_hold_prompts_of_like_length_longest_first(tmp_path, chat):
    engine = EchoEngine()
    run(engine, chat, several(), tmp_path / "r.jsonl")
    assert [size for size, _, _ in engine.batches[:5]] == [8] * 5
    lengths = [len(prompt) for prompt in engine.prompts[:40]]
    assert lengths == sorted(lengths, reverse=True)
    assert plan_batches([], 8) == []


def test_windows_bound_what_is_held_and_change_no_greedy_answer(tmp_path, chat, monkeypatch):
    whole = run(EchoEngine(), chat, several(), tmp_path / "a.jsonl").records
    monkeypatch.setattr(respond_module, "WINDOW", 7)
    held = []
    monkeypatch.setattr(respond_module, "plan_batches", lambda r, n: held.append(len(r)) or plan_batches(r, n))
    assert run(EchoEngine(), chat, several(), tmp_path / "b.jsonl").records == whole
    assert max(held) == 7


# --- resume


def test_nothing_in_the_journal_is_generated_again(tmp_path, chat):
    first = run(EchoEngine(), chat, several(), tmp_path / "r.jsonl")
    engine = EchoEngine()
    again = run(engine, chat, several(), tmp_path / "r.jsonl")
    assert engine.prompts == [] and again.records == first.records
    assert sum(event.turns for event in again.events if event.reused) == 60


class Killed(EchoEngine):
    """Dies by SIGKILL at its n-th batch."""

    def __init__(self, engine, batches):
        super().__init__()
        self.engine, self.left = engine, batches

    def generate(self, batch, **options):
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        return self.engine.generate(batch, **options)


@pytest.mark.parametrize("batches", [0, 1, 4, 6])
def test_kill_then_resume_gives_what_an_unbroken_run_gives(tmp_path, real, batches):
    engine, chat = real
    unbroken = run(engine, chat, several(), tmp_path / "a.jsonl", sampling=SAMPLED)
    torch.set_num_threads(1)  # a forked child cannot use the parent's thread pool
    child = multiprocessing.get_context("fork").Process(
        target=run,
        args=(Killed(engine, batches), chat, several(), tmp_path / "b.jsonl"),
        kwargs={"sampling": SAMPLED},
    )
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    resumed = run(engine, chat, several(), tmp_path / "b.jsonl", sampling=SAMPLED)
    assert resumed.records == unbroken.records
    # 40 first turns are 5 batches of 8, 10 second turns are batches of 8 and 2
    assert sum(event.turns for event in resumed.events if event.reused) == 8 * batches


def test_a_torn_batch_is_completed(tmp_path, chat):
    path = tmp_path / "r.jsonl"
    whole = run(EchoEngine(), chat, several(), path).records
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    engine = EchoEngine()
    resumed = run(engine, chat, several(), path).records
    assert resumed == whole and 0 < len(engine.prompts) < 60


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"verifier_sha256": "other"}, "verifier_sha256"),
        ({"sampling": SAMPLED}, "temperature, top_p, seed"),
        ({"conversations": [conversation("c", user("Another text."))]}, "prompt_ids"),
    ],
)
def test_a_journal_of_other_settings_is_refused(tmp_path, chat, change, named):
    run(EchoEngine(), chat, [conversation("c", user("Some text."))], tmp_path / "r.jsonl")
    conversations = change.pop("conversations", [conversation("c", user("Some text."))])
    with pytest.raises(ValueError, match=rf"r.jsonl: turn 0 of c was journalled with another {named}"):
        run(EchoEngine(), chat, conversations, tmp_path / "r.jsonl", **change)


def test_batch_seeds_differ_and_follow_the_seed(tmp_path, chat):
    first, same, other = EchoEngine(), EchoEngine(), EchoEngine()
    run(first, chat, several(), tmp_path / "a.jsonl", sampling=SAMPLED)
    run(same, chat, several(), tmp_path / "b.jsonl", sampling=SAMPLED)
    run(other, chat, several(), tmp_path / "c.jsonl", sampling=Sampling(6, 1.0, 0.95, seed=4))
    seeds = [{seed for _, seed, _ in engine.batches} for engine in (first, same, other)]
    assert len(seeds[0]) == len(first.batches) and seeds[0] == seeds[1] and not seeds[0] & seeds[2]


# --- given answers


DIALOGUE = conversation("d", user("Hello?"), assistant("Hi, old answer."), user("And now?"))


def test_given_answers_are_replaced_and_gone_from_the_history(tmp_path, chat):
    records = run(EchoEngine(), chat, [DIALOGUE], tmp_path / "r.jsonl").records
    assert {key: r["source"] for key, r in records.items()} == {("d", 0): "generated", ("d", 1): "generated"}
    assert "old answer" not in chat.tokenizer.decode(records["d", 1]["prompt_ids"])


def test_given_answers_are_kept_on_request_and_not_generated(tmp_path, chat):
    engine = EchoEngine()
    outcome = run(engine, chat, [DIALOGUE], tmp_path / "r.jsonl", keep_given=True)
    kept = outcome.records["d", 0]
    assert kept["source"] == "given" and kept["temperature"] == 1.0 and kept["seed"] is None
    assert chat.tokenizer.decode(kept["response_ids"]) == "Hi, old answer.<|im_end|>"
    assert outcome.records["d", 1]["prompt_ids"] == chat.prompt_ids(DIALOGUE.messages)
    assert len(engine.prompts) == 1 == count_turns([DIALOGUE], keep_given=True)
    again = EchoEngine()
    assert run(again, chat, [DIALOGUE], tmp_path / "r.jsonl", keep_given=True).records == outcome.records
    assert again.prompts == []


TOOL_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{{ m['content'] or m['tool_calls'] | tojson }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_a_given_tool_call_stays_with_its_results(tmp_path):
    chat = Chat(tiny_tokenizer(chat_template=TOOL_TEMPLATE), (STOP,), 320)
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    talk = conversation(
        "t",
        user("How warm is it?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "21 degrees"},
        assistant("It is cold."),
    )
    records = run(EchoEngine(), chat, [talk], tmp_path / "r.jsonl").records
    assert list(records) == [("t", 1)]
    prompt = chat.tokenizer.decode(records["t", 1]["prompt_ids"])
    assert "weather" in prompt and "21 degrees" in prompt and "cold" not in prompt


# --- what cannot be answered


def test_one_request_that_always_fails_is_skipped_and_the_rest_is_done(tmp_path, chat):
    conversations = several()
    bad = chat.prompt_ids(conversations[7].messages)
    outcome = run(EchoEngine(fails=lambda prompt: prompt == bad), chat, conversations, tmp_path / "r.jsonl")
    assert [s.id for s in outcome.skipped] == ["c7"] and "failed 2 times alone: no answer" in outcome.skipped[0].reason
    assert len(outcome.records) == 59


def test_a_broken_engine_stops_and_what_is_done_is_kept(tmp_path, chat):
    engine = EchoEngine()
    engine.fails = lambda prompt: len(engine.prompts) >= 16
    with pytest.raises(EngineError, match="4 requests in a row failed"):
        run(engine, chat, several(), tmp_path / "r.jsonl", patience=Patience(attempts=2, stop_after=4))
    repaired = EchoEngine()
    assert len(run(repaired, chat, several(), tmp_path / "r.jsonl").records) == 60
    assert len(repaired.prompts) == 60 - 16


def test_a_prompt_without_room_for_an_answer_is_skipped_with_its_length(tmp_path, chat):
    conversations = [conversation("long", user("x " * 300)), conversation("short", user("x"))]
    engine = EchoEngine()
    outcome = run(engine, chat, conversations, tmp_path / "r.jsonl", max_len=100)
    assert list(outcome.records) == [("short", 0)]
    assert outcome.skipped[0].id == "long" and "leaves no room for an answer in 100" in outcome.skipped[0].reason
    room = 100 - len(engine.prompts[0])
    assert engine.batches[0][2] == min(6, room)


def test_earlier_turns_stay_when_a_later_prompt_is_too_long(tmp_path, chat):
    talk = conversation("c", user("short"), user("long " * 200), user("short"))
    outcome = run(EchoEngine(), chat, [talk], tmp_path / "r.jsonl", max_len=100)
    assert list(outcome.records) == [("c", 0)] and outcome.skipped[0].reason.startswith("turn 1: the prompt has")


def test_a_conversation_that_the_template_refuses_is_skipped(tmp_path):
    template = "{% if 'bad' in messages[0]['content'] %}{{ raise_exception('refused') }}{% endif %}" + TOOL_TEMPLATE
    chat = Chat(tiny_tokenizer(chat_template=template), (STOP,), 320)
    conversations = [conversation(f"c{i}", user("bad" if i == 3 else "good")) for i in range(6)]
    outcome = run(EchoEngine(), chat, conversations, tmp_path / "r.jsonl")
    assert [s.id for s in outcome.skipped] == ["c3"] and "refused" in outcome.skipped[0].reason
    assert len(outcome.records) == 5


def test_ids_beyond_the_verifiers_vocabulary_are_skipped_with_the_reason(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<|tool|>"], special_tokens=True)
    chat = Chat(tokenizer, (STOP,), 320)
    conversations = [conversation("a", user("<|tool|>")), conversation("b", user("plain"))]
    outcome = run(EchoEngine(), chat, conversations, tmp_path / "r.jsonl")
    assert list(outcome.records) == [("b", 0)] and "token id 320" in outcome.skipped[0].reason
