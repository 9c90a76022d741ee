"""The in-process engine against plain transformers: same states, same greedy text, whatever the batch."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extract.engines import ENGINES, EngineError, InProcessEngine
from extract.verifier import load_head, load_model, resolve_verifier
from tests.tiny import edit_json, tiny_verifier

LAYERS = (1, 3, 6)


def engine_of(path, *, capture_layers=LAYERS, dtype=torch.float32):
    spec = resolve_verifier(str(path), name="tiny", cache_dir=path.parent, chat_template=None, trust_remote_code=False)
    return InProcessEngine(spec, capture_layers=capture_layers, dtype=dtype, device="cpu")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return engine_of(tiny_verifier(tmp_path_factory.mktemp("verifier") / "v"))


def random_prompts(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 320, (n,), generator=generator).tolist() for n in lengths]


PROMPTS = random_prompts([5, 1, 17, 9, 30, 2, 17, 12])


def plain_states(engine, prompt):
    """Straight from transformers: one unpadded sequence, all hidden states."""
    with torch.no_grad():
        output = engine.model(torch.tensor([prompt]), output_hidden_states=True)
    states = [state[0] for state in output.hidden_states]
    return torch.cat([states[k] for k in engine.capture_layers], dim=1), states[-1], output.logits[0]


def assert_same(captured, prompts, engine):
    assert len(captured) == len(prompts)
    for states, prompt in zip(captured, prompts, strict=True):
        aux, last, _ = plain_states(engine, prompt)
        torch.testing.assert_close(states.aux, aux, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(states.last, last, rtol=1e-4, atol=1e-4)


def test_same_states_with_batch_1_batch_4_and_in_two_calls(engine):
    assert_same([engine.capture([prompt])[0] for prompt in PROMPTS], PROMPTS, engine)
    assert_same(engine.capture(PROMPTS[:4]) + engine.capture(PROMPTS[4:]), PROMPTS, engine)
    assert_same(engine.capture(PROMPTS), PROMPTS, engine)
    assert_same(engine.capture(PROMPTS), PROMPTS, engine)


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_any_batch_gives_every_sequence_its_own_rows(engine, lengths, seed):
    prompts = random_prompts(lengths, seed)
    assert_same(engine.capture(prompts), prompts, engine)


def test_forty_sequences_give_forty_results(engine):
    prompts = random_prompts(range(1, 41))
    captured = [states for i in range(0, 40, 8) for states in engine.capture(prompts[i : i + 8])]
    assert [len(states.aux) for states in captured] == list(range(1, 41))


def test_layer_k_is_the_input_of_layer_k_and_not_its_output(tmp_path):
    path = tiny_verifier(tmp_path / "v", layers=5)
    for layers in [(1, 2, 4), (1, 2, 3)]:  # with the last layer and without
        engine = engine_of(path, capture_layers=layers)
        (captured,) = engine.capture(PROMPTS[:1])
        with torch.no_grad():
            hidden = engine.model(torch.tensor([PROMPTS[0]]), output_hidden_states=True).hidden_states
        for part, k in zip(captured.aux.split(48, dim=1), layers, strict=True):
            torch.testing.assert_close(part, hidden[k][0], rtol=1e-4, atol=1e-4)
            assert not torch.allclose(part, hidden[k - 1][0], atol=1e-2)
            assert not torch.allclose(part, hidden[k + 1][0], atol=1e-2)


@pytest.mark.parametrize("layers", [(1, 2, 5), (-1, 2, 3), (2, 2, 3), (0, 1, 2)])
def test_wrong_capture_layers_are_refused(tmp_path, layers):
    with pytest.raises(ValueError, match=r"verifier\.capture_layers"):
        engine_of(tiny_verifier(tmp_path / "v", layers=5), capture_layers=layers)


FORMS = [{}, {"tied": False}, {"family": "qwen3", "head_dim": 16}, {"family": "mixtral"}, {"nested": True}]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_head_on_last_gives_the_verifiers_own_logits(tmp_path, form):
    engine = engine_of(tiny_verifier(tmp_path / "v", **form))
    head = load_head(engine.spec)
    for captured, prompt in zip(engine.capture(PROMPTS), PROMPTS, strict=True):
        _, _, logits = plain_states(engine, prompt)
        torch.testing.assert_close(captured.last @ head.T, logits, rtol=1e-3, atol=1e-3)
        assert torch.equal((captured.last @ head.T).argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_shapes_dtype_and_number_of_captured_layers(tmp_path, form):
    engine = engine_of(tiny_verifier(tmp_path / "v", **form), dtype=torch.bfloat16)
    for captured, prompt in zip(engine.capture(PROMPTS), PROMPTS, strict=True):
        assert captured.aux.shape == (len(prompt), 3 * 48) and captured.last.shape == (len(prompt), 48)
        assert captured.aux.dtype == captured.last.dtype == torch.bfloat16
        assert captured.aux.is_contiguous() and not captured.aux.requires_grad
        assert not captured.aux.is_inference()


def test_hooks_are_gone_after_a_capture_even_if_it_failed(engine, monkeypatch):
    def fail(_hidden):
        raise RuntimeError("broken")

    def hooks():
        return [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in engine.model.modules()]

    before = hooks()
    engine.capture(PROMPTS[:2])
    assert hooks() == before
    with monkeypatch.context() as broken, pytest.raises(RuntimeError, match="broken"):
        broken.setattr(engine.backbone.norm, "forward", fail)
        engine.capture(PROMPTS[:2])
    assert hooks() == before


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([[5], []], "sequence 1 of the batch is empty"),
        ([[320]], r"sequence 0 .* ids outside 0 .. 319"),
        ([[5], [5], [-1]], "sequence 2 "),
        ([[5] * 513], "max_position_embeddings 512; lower extraction.max_len"),
    ],
)
def test_ids_that_the_verifier_cannot_take_are_named(engine, batch, message):
    with pytest.raises(ValueError, match=message):
        engine.capture(batch)
    with pytest.raises(ValueError, match=message):
        engine.generate(batch, max_new_tokens=1, temperature=0.0, top_p=1.0, seed=0, stop_ids=())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_are_not_finite_name_the_sequence(tmp_path, value):
    engine = engine_of(tiny_verifier(tmp_path / "v", tied=False))
    engine.model.get_input_embeddings().weight[7] = value
    with pytest.raises(EngineError, match=r"sequences \[1, 3\] of the batch hold NaN or inf"):
        engine.capture([[5, 6], [5, 7], [8], [7]])
    assert len(engine.capture([[5, 6], [8]])) == 2


# --- generation


def generate(engine, prompts, **changes):
    options = {"max_new_tokens": 12, "temperature": 0.0, "top_p": 1.0, "seed": 0, "stop_ids": ()}
    return engine.generate(prompts, **(options | changes))


def plain_greedy(engine, prompt, count):
    """Greedy decoding without cache, padding or generate()."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(engine.model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_greedy_is_the_argmax_chain_for_any_batch(engine):
    wanted = [plain_greedy(engine, prompt, 12) for prompt in PROMPTS]
    assert [answer.ids for answer in generate(engine, PROMPTS)] == wanted
    assert [generate(engine, [prompt])[0].ids for prompt in PROMPTS] == wanted
    assert {answer.finish_reason for answer in generate(engine, PROMPTS)} == {"length"}


def test_generation_config_of_the_verifier_has_no_say(tmp_path):
    path = tiny_verifier(tmp_path / "v")
    wanted = [answer.ids for answer in generate(engine_of(path), PROMPTS)]
    edit_json(
        path / "generation_config.json",
        do_sample=True,
        temperature=5.0,
        top_k=3,
        repetition_penalty=4.0,
        no_repeat_ngram_size=1,
        forced_eos_token_id=2,
        suppress_tokens=wanted[0][:3],
        max_length=3,
    )
    assert [answer.ids for answer in generate(engine_of(path), PROMPTS)] == wanted


def test_stops_after_the_first_end_of_turn_token(engine):
    free = [answer.ids for answer in generate(engine, PROMPTS)]
    stop = free[0][4]
    for answer, ids in zip(generate(engine, PROMPTS, stop_ids={stop, 319}), free, strict=True):
        end = next((i + 1 for i, token in enumerate(ids) if token in (stop, 319)), None)
        assert answer.ids == ids[:end] and answer.finish_reason == ("length" if end is None else "stop")
    first = generate(engine, PROMPTS, stop_ids=[stop])[0]
    assert first.ids[-1] == stop and first.ids.count(stop) == 1 and first.finish_reason == "stop"


def test_prompts_that_hold_the_end_of_turn_token_are_not_masked(engine):
    prompts = [[2, 2, 5, 2, 9], [2], [7, 2]]
    wanted = [plain_greedy(engine, prompt, 6) for prompt in prompts]
    assert [answer.ids for answer in generate(engine, prompts, max_new_tokens=6)] == wanted


def test_sampling_depends_on_seed_and_batch_alone(engine):
    options = {"temperature": 1.5, "top_p": 0.9, "max_new_tokens": 20}
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = generate(engine, PROMPTS, seed=5, **options)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert generate(engine, PROMPTS, seed=5, **options) == first
    assert generate(engine, PROMPTS, seed=6, **options) != first


def test_sampling_draws_from_the_whole_distribution_at_the_temperature(engine):
    """No top-k in secret: the first token's frequencies are softmax(logits / temperature)."""
    prompt, temperature, count = PROMPTS[0], 30.0, 4000
    answers = generate(engine, [prompt] * count, temperature=temperature, max_new_tokens=1)
    drawn = torch.bincount(torch.tensor([answer.ids[0] for answer in answers]), minlength=320) / count
    _, _, logits = plain_states(engine, prompt)
    wanted = torch.softmax(logits[-1] / temperature, -1)
    assert int((drawn > 0).sum()) > 200
    assert float((drawn - wanted).abs().sum()) < 0.3


def test_tiny_top_p_is_greedy(engine):
    answers = generate(engine, PROMPTS, temperature=0.7, top_p=1e-6)
    assert [answer.ids for answer in answers] == [answer.ids for answer in generate(engine, PROMPTS)]


@pytest.mark.parametrize("change", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_impossible_sampling_is_refused(engine, change):
    with pytest.raises(ValueError, match=next(iter(change))):
        generate(engine, PROMPTS, **change)


def test_out_of_memory_is_an_engine_error(engine, monkeypatch):
    def full(*_args, **_options):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(engine, "model", SimpleNamespace(generate=full))
    with pytest.raises(EngineError, match="too little memory for a batch of 8"):
        generate(engine, PROMPTS)


def test_empty_batch_gives_nothing(engine):
    assert engine.capture([]) == [] and generate(engine, []) == []


def test_engines_are_found_by_name_and_say_their_version(engine):
    assert ENGINES[engine.name] is InProcessEngine and engine.version.count(".") >= 1


def test_close_frees_the_model(tmp_path):
    engine = engine_of(tiny_verifier(tmp_path / "v"))
    engine.close()
    assert not hasattr(engine, "model")


def test_float32_engine_loads_a_bfloat16_verifier_exactly(tmp_path):
    engine = engine_of(tiny_verifier(tmp_path / "v", dtype=torch.bfloat16), dtype=torch.float32)
    stored = load_model(engine.spec, dtype=torch.bfloat16, device="cpu")
    for mine, theirs in zip(engine.model.parameters(), stored.parameters(), strict=True):
        assert torch.equal(mine, theirs.float())
