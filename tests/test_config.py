import dataclasses
import json
import re
from typing import Any

import pytest
import yaml
from composed import changed, composed, config
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from eagle3 import config as eagle3_config
from eagle3.config import Config, ConfigError, as_dict, from_values, typed
from eagle3.naming import run_id, sweep_id
from extract import config as extract_config
from extract.config import Extraction
from extract.manifest import store_manifest
from extract.respond import Sampling
from extract.verifier import VerifierSpec


def refusal(raw) -> str:
    with pytest.raises(ConfigError) as caught:
        typed(raw)
    return str(caught.value)


def test_a_typo_is_refused_with_its_key():
    with pytest.raises(ConfigCompositionException, match=r"Could not override 'optimizer.lrr'"):
        composed("optimizer.lrr=1e-3")
    assert "optimizer.lrr is no setting" in refusal(changed(optimizer__lrr=1e-3))
    assert "speed is no setting" in refusal(changed(speed=1))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.lr", "abc"),
        ("optimizer.lr", True),
        ("optimizer.epochs", 1.5),
        ("optimizer.epochs", True),
        ("optimizer.betas", 0.9),
        ("drafter.fc_norm", 3),
        ("drafter.loss", "mse"),
        ("verifier.capture_layers", "all"),
        ("verifier.trust_remote_code", "perhaps"),
        ("extraction.prompts", 7),
        ("verifier.capture_layers", [2, True, 4]),
        ("tracking.tags", "one"),
        ("seed", None),
        ("name", 2024),
    ],
)
def test_a_wrong_type_is_refused_with_its_key_and_value(key, value):
    told = refusal(changed(**{key.replace(".", "__"): value}))
    assert re.match(rf"{key}(\.1)?=", told) and ("True" if value == [2, True, 4] else repr(value)) in told, told


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.lr", 0),
        ("optimizer.lr", -1e-3),
        ("optimizer.lr", float("inf")),
        ("optimizer.lr", float("nan")),
        ("optimizer.betas", [0.9]),
        ("optimizer.warmup_ratio", 1.0),
        ("optimizer.floor_ratio", 1.1),
        ("drafter.ttt_steps", 0),
        ("drafter.ttt_steps", 17),
        ("drafter.step_decay", 1.5),
        ("drafter.noise_std", -0.1),
        ("drafter.draft_vocab_size", 0),
        ("data.val_fraction", 0),
        ("data.val_fraction", 1),
        ("data.val_every_steps", 0),
        ("extraction.max_len", 4),
        ("extraction.top_p", 0),
        ("extraction.temperature", -1),
        ("extraction.shard_mib", 2000),
        ("hardware.num_workers", -1),
        ("hardware.devices", 0),
        ("evaluation.drafts", 0),
        ("evaluation.max_new_tokens", 1),
        ("seed", -1),
        ("name", "a/b"),
        ("name", ""),
        ("name", ".."),
        ("verifier.name", "lr=1"),
        ("store", ""),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_key(key, value):
    told = refusal(changed(**{key.replace(".", "__"): value}))
    assert told.startswith(f"{key}={value!r}: "), told


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"hardware.devices": 2}, ("hardware.devices=2", "hardware.strategy=auto")),
        ({"hardware.strategy": "ddp"}, ("hardware.devices=1", "hardware.strategy=ddp")),
        ({"extraction.top_p": 0.9}, ("extraction.top_p=0.9", "extraction.temperature=0")),
        ({"extraction.max_new_tokens": 256}, ("extraction.max_new_tokens=256", "extraction.max_len=256")),
        ({"optimizer.batch_tokens": 1000}, ("optimizer.batch_tokens=1000", "extraction.max_len=256", "use 768")),
        ({"optimizer.batch_tokens": 100}, ("optimizer.batch_tokens=100", "extraction.max_len=256", "use 256")),
        ({"evaluation.max_new_tokens": 300}, ("evaluation.max_new_tokens=300", "extraction.max_len=256")),
        ({"server.flags": {"tp": 2}}, ("server.engine=inprocess", "server.flags")),
    ],
)
def test_settings_that_contradict_each_other_are_named(overrides, named):
    told = refusal(changed(**{key.replace(".", "__"): value for key, value in overrides.items()}))
    assert all(name in told for name in named), told


def test_every_fault_is_told_at_once():
    told = refusal(changed(optimizer__lr=-1, drafter__ttt_steps=99, tracking__mode="cloud"))
    assert [line.split("=")[0] for line in told.splitlines()] == ["drafter.ttt_steps", "optimizer.lr", "tracking.mode"]


def test_an_unset_key_is_named_before_anything_else():
    with pytest.raises(ConfigError) as caught:
        config("verifier=hf")
    assert str(caught.value).splitlines() == [
        "verifier.name is not set; give it on the command line: verifier.name=VALUE",
        "verifier.path is not set; give it on the command line: verifier.path=VALUE",
    ]
    # Also one that only a later stage reads.
    assert "evaluation.prompts is not set" in refusal(changed(evaluation__prompts="???"))


def test_a_value_from_the_environment_is_checked_and_converted(monkeypatch):
    raw = changed(optimizer__lr="${oc.env:LR}", optimizer__epochs="${oc.env:EPOCHS}")
    monkeypatch.setenv("EPOCHS", "3")
    monkeypatch.setenv("LR", "abc")
    assert refusal(raw).startswith("optimizer.lr='abc': Input should be a valid number")
    monkeypatch.setenv("LR", "1e-4")
    checked = typed(raw).optimizer
    assert checked.lr == 1e-4 and isinstance(checked.lr, float)
    assert checked.epochs == 3 and isinstance(checked.epochs, int)


@pytest.mark.parametrize("written", ["1e-4", "1E-4", "0.0001"])
def test_a_rate_stays_a_number_however_it_is_written_and_saved(written):
    checked = config(f"optimizer.lr={written}")
    assert checked.optimizer.lr == 1e-4 and isinstance(checked.optimizer.lr, float)
    values = as_dict(checked)
    for reader in (json.loads(json.dumps(values)), yaml.safe_load(yaml.safe_dump(values))):
        assert isinstance(reader["optimizer"]["lr"], float)
        assert isinstance(reader["optimizer"]["eps"], float)
        assert from_values(reader) == checked


def test_a_broken_interpolation_is_named_with_its_key_and_file():
    with pytest.raises(ConfigError) as caught:
        config("drafter.rope_parameters={rope_theta: '${drafter.theta}'}", "tracking.tags=[a,'${nowhere}']")
    assert str(caught.value).splitlines() == [
        "drafter.rope_parameters.rope_theta cannot be resolved: Interpolation key 'drafter.theta' not found; "
        "see conf/drafter/eagle3.yaml and the command line",
        "tracking.tags.1 cannot be resolved: Interpolation key 'nowhere' not found; "
        "see conf/tracking/offline.yaml and the command line",
    ]


@pytest.mark.parametrize("key", ["drafter.hidden_size", "drafter.vocab_size", "optimizer.total_steps", "data.packs"])
def test_what_is_derived_cannot_be_set_by_hand(key):
    with pytest.raises(ConfigCompositionException, match=f"Could not override '{key}'"):
        composed(f"{key}=8")
    with pytest.raises(ConfigError, match=f"{key} is no setting"):
        config(f"+{key}=8")


def test_a_path_may_hold_the_grammar_s_characters_when_quoted():
    """README: a value with = * @ or a space is quoted twice."""
    assert config("resume='out/epoch=3-step=12.ckpt'").resume == "out/epoch=3-step=12.ckpt"
    assert config("drafter.init_from='a*b@c d'").drafter.init_from == "a*b@c d"


SPEC = VerifierSpec(
    name="tiny", path=".", sha256="a", tokenizer_sha256="b", chat_template_sha256="c", model_type="llama",
    hidden_size=8, num_layers=7, vocab_size=100, num_heads=2, num_kv_heads=2, head_dim=4, intermediate_size=16,
    rms_norm_eps=1e-5, hidden_act="silu", rope_parameters={}, max_position_embeddings=512, tied_head=True,
    end_of_turn_ids=(2,), source="tiny", trust_remote_code=False,
)  # fmt: skip


def manifest_of(extraction: Extraction, seed: int = 0) -> dict[str, Any]:
    sampling = Sampling(extraction.max_new_tokens, extraction.temperature, extraction.top_p, seed)
    return store_manifest(
        SPEC, extraction, sampling, capture_layers=(2, 3, 4), engine="inprocess", engine_version="1", dtype="float32"
    )


def test_every_extraction_setting_that_decides_the_samples_is_in_the_manifest(tmp_path):
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        file.write_text(json.dumps({"prompt": file.stem}) + "\n")
    base = dataclasses.replace(config().extraction, prompts=str(files[0]), temperature=1.0)
    other = {
        "prompts": str(files[1]), "limit": 3, "system_prompt": "Be brief.", "responses": "keep",
        "max_new_tokens": 7, "temperature": 0.5, "top_p": 0.5, "max_len": 64, "dtype": "float32", "codec": "fp8",
        "split": "test",
    }  # fmt: skip
    harmless = {"concurrency", "capture_tokens", "shard_mib"}
    assert other.keys() | harmless == {field.name for field in dataclasses.fields(Extraction)}
    for key, value in other.items():
        changed_manifest = manifest_of(dataclasses.replace(base, **{key: value}))
        both = [(m["must_match"], m["dtype"], m["codec"]) for m in (manifest_of(base), changed_manifest)]
        assert both[0] != both[1], key


def sections() -> list[type]:
    found = [value for module in (extract_config, eagle3_config) for value in vars(module).values()]
    return list(dict.fromkeys(c for c in found if hasattr(c, "__pydantic_fields__")))


def test_every_field_is_documented_where_it_is_declared():
    assert len(sections()) == 14
    groups = {field.name for field in dataclasses.fields(Config) if hasattr(field.type, "__pydantic_fields__")}
    assert len(groups) == 10
    for section in sections():
        bare = {name for name, field in section.__pydantic_fields__.items() if not field.description}
        assert bare == (groups if section is Config else set()), section.__name__


def test_no_field_has_a_default():
    for section in sections():
        for field in dataclasses.fields(section):
            assert field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING, field.name


def test_config_is_frozen_and_plain():
    checked = config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        checked.seed = 1
    assert isinstance(json.dumps(as_dict(checked)), str)
    assert from_values(as_dict(checked)) == checked


def test_the_run_directory_follows_what_its_stage_depends_on():
    names = {stage: run_id(stage, _root_=changed()) for stage in ("extract", "train", "evaluate")}
    assert all(name.startswith("quickstart-") for name in names.values())

    def renamed(**values):
        return {stage for stage, name in names.items() if run_id(stage, _root_=changed(**values)) != name}

    assert renamed(tracking__mode="local") == renamed(dry_run=True) == set()
    assert renamed(optimizer__lr=2e-4) == {"train", "evaluate"}
    assert renamed(evaluation__drafts=2) == {"evaluate"}
    assert renamed(seed=1) == renamed(extraction__max_len=512) == {"extract", "train", "evaluate"}


def test_one_sweep_command_has_one_directory():
    first, same, other = (
        sweep_id("n", OmegaConf.create(told)) for told in (["a=1,2", "b=3"], ["b=3", "a=1,2"], ["a=1,2"])
    )
    assert first == same != other and first.startswith("n-")


def test_each_key_is_an_attribute_of_the_checked_config():
    def leaves(tree, prefix=""):
        for key, value in tree.items():
            yield f"{prefix}{key}"
            if isinstance(value, dict) and key not in ("env", "flags", "rope_parameters"):
                yield from leaves(value, f"{prefix}{key}.")

    checked: Any = config()
    told = set(leaves(OmegaConf.to_container(changed())))
    assert told == set(leaves(as_dict(checked)))
    assert isinstance(checked, Config)


@pytest.mark.parametrize("key", ["hardware.env.A", "server.env.A", "server.flags.tp_size"])
def test_sections_for_an_engine_take_any_key_as_it_is_typed_and_others_do_not(key):
    section, name = key.rsplit(".", 1)
    assert OmegaConf.select(composed("server=sglang", f"{key}=b"), section)[name] == "b"
    with pytest.raises(ConfigCompositionException, match="Could not override"):
        composed("server=sglang", f"{section.rsplit('.', 1)[0]}.{name}=b")
