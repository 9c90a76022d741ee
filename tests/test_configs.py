"""What lies in conf/ can be used: every option of every group, for every script, as a user would choose it."""

from dataclasses import asdict, is_dataclass

import pytest
from composed import CONF, SCRIPTS, composed, config
from omegaconf import OmegaConf
from scripts import ROOT, Script

GROUPS = ("hardware", "verifier", "server", "extraction", "drafter", "optimizer", "serving", "tracking", "experiment")
OPTIONS = [(group, file.stem) for group in GROUPS for file in sorted((CONF / group).glob("*.yaml"))]
NEEDS = {
    ("verifier", "hf"): ("verifier.name=mine", "verifier.path=some/dir"),
    ("verifier", "kimi_k25"): ("verifier.path=some/dir",),
    ("experiment", "kimi_k25"): ("verifier.path=some/dir",),
}
"""What an option leaves for the user to say."""
PRESENT = [name for name in SCRIPTS if (ROOT / f"{name}.py").exists()]


def test_every_group_has_options_and_nothing_else_lies_in_conf():
    assert {group for group, _ in OPTIONS} == set(GROUPS)
    folders = {path.name for path in CONF.iterdir() if path.is_dir()} - {"hydra"}
    assert folders == set(GROUPS)
    assert {path.stem for path in CONF.glob("*.yaml")} == {"base", *SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_an_option_composes_and_is_typed(group, option, script):
    checked = config(f"{group}={option}", *NEEDS.get((group, option), ()), script=script)
    if group == "experiment":
        return
    told = OmegaConf.load(CONF / group / f"{option}.yaml")
    section = getattr(checked, group)
    by_experiment = OmegaConf.load(CONF / "experiment" / "quickstart.yaml").get(group, {})
    for key in told.keys() - {"defaults"} - by_experiment.keys():
        if not OmegaConf.is_missing(told, key):
            value = OmegaConf.to_container(told)[key]
            typed = getattr(section, key)
            # An option on top of another says a part of a nested section.
            assert value.items() <= asdict(typed).items() if is_dataclass(typed) else typed == value


def test_every_key_of_a_group_is_in_each_of_its_options():
    """With what an option inherits: choosing another one never leaves a key of the former behind."""
    for group in set(GROUPS) - {"experiment"}:
        keys = {option: set(composed(f"{group}={option}")[group]) for g, option in OPTIONS if g == group}
        assert len({frozenset(found) for found in keys.values()}) == 1, keys


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the scripts say when they are asked about themselves, all at once."""
    folder = tmp_path_factory.mktemp("asked")
    running = {
        (name, question): Script(f"{name}.py", *words, cwd=folder, COMP_LINE=f"python {name}.py hardware=")
        for name in PRESENT
        for question, words in {"help": ["--help"], "cfg": ["--cfg", "job"], "tab": ["-sc", "query=bash"]}.items()
    }
    ended = {key: script.wait() for key, script in running.items()}
    assert not [path for path in folder.rglob("*") if path.suffix != ".out"], "asking writes nothing"
    return ended


@pytest.mark.parametrize("name", PRESENT)
def test_help_teaches_the_groups_and_how_to_choose(told, name):
    done = told[name, "help"]
    assert done.code == 0
    for group in GROUPS:
        options = ", ".join(option for g, option in OPTIONS if g == group)
        assert f"{group}: {options}" in done.output
    assert f"python {name}.py hardware=h200" in done.output and f'eval "$(python {name}.py -sc install=bash)"' in (
        done.output
    )


@pytest.mark.parametrize("name", PRESENT)
def test_cfg_job_shows_the_config_as_it_is_composed(told, name):
    done = told[name, "cfg"]
    assert done.code == 0
    assert OmegaConf.create(done.output) == composed(script=name)


@pytest.mark.parametrize("name", PRESENT)
def test_tab_completion_offers_the_options_of_a_group(told, name):
    done = told[name, "tab"]
    assert done.code == 0
    assert done.output.split() == [f"hardware={option}" for group, option in OPTIONS if group == "hardware"]


def test_each_script_has_its_own_server_and_an_experiment_or_the_command_line_another():
    assert [config(script=script).server.engine for script in SCRIPTS] == ["inprocess"] * 3 + ["vllm"]
    for script in SCRIPTS:
        assert config("experiment=smollm2_h200", script=script).server.engine == "sglang"
        assert config("experiment=smollm2_h200", "server=sglang_cpu", script=script).server.flags["device"] == "cpu"


def test_only_serve_starts_without_a_drafter():
    assert [config(script=script).drafter_dir is None for script in SCRIPTS] == [False] * 3 + [True]
