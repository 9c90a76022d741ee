"""Launchers and sweepers that not everybody installs: their configs compose, with keys that the plugins take."""

import pytest
from composed import CONF
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

# Of hydra-submitit-launcher 1.2.0, hydra-ray-launcher 1.2.2 and hydra-optuna-sweeper 1.3.0.
KEYS = {
    "slurm": """
        submitit_folder timeout_min cpus_per_task gpus_per_node tasks_per_node mem_gb nodes name stderr_to_stdout
        partition qos comment constraint exclude gres cpus_per_gpu gpus_per_task mem_per_gpu mem_per_cpu account
        signal_delay_s max_num_timeout additional_parameters array_parallelism setup""",
    "ray_gpus": "ray",
    "tpe": """sampler direction storage study_name n_trials n_jobs max_failure_rate search_space params
        custom_search_space""",
}
PLUGINS = {
    ("launcher", "slurm"): ("hydra_submitit_launcher.submitit_launcher.SlurmLauncher", KEYS["slurm"]),
    ("launcher", "ray_gpus"): ("hydra_ray_launcher.ray_launcher.RayLauncher", KEYS["ray_gpus"]),
    ("launcher", "joblib"): ("hydra_joblib_launcher.joblib_launcher.JoblibLauncher", None),
    ("sweeper", "tpe"): ("hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper", KEYS["tpe"]),
}


def composed_hydra(*overrides):
    with initialize_config_dir(str(CONF), version_base="1.3", job_name="train"):
        return compose("train", list(overrides), return_hydra_config=True).hydra


@pytest.mark.parametrize(("group", "option"), list(PLUGINS))
def test_a_plugins_config_composes_with_keys_that_it_takes(group, option):
    target, keys = PLUGINS[group, option]
    node = composed_hydra(f"hydra/{group}={option}")[group]
    assert node._target_ == f"hydra_plugins.{target}"
    assert keys is None or set(node) - {"_target_"} <= set(keys.split())
    if group == "sweeper":
        assert set(node) - {"_target_"} == set(keys.split()), "the sweeper has no defaults for what is left out"


def test_a_job_of_a_cluster_has_one_device():
    slurm = composed_hydra("hydra/launcher=slurm").launcher
    assert (slurm.nodes, slurm.tasks_per_node, slurm.gpus_per_node) == (1, 1, 1)
    assert composed_hydra("hydra/launcher=ray_gpus").launcher.ray.remote.num_gpus == 1


def test_the_search_is_for_the_longest_acceptance_over_keys_that_exist():
    sweeper = composed_hydra("hydra/sweeper=tpe").sweeper
    assert sweeper.direction == "maximize", "train.py returns val/accept_len"
    overrides = OverridesParser.create().parse_overrides([f"{key}={text}" for key, text in sweeper.params.items()])
    assert all(override.is_sweep_override() for override in overrides)
    with initialize_config_dir(str(CONF), version_base="1.3", job_name="train"):
        raw = compose("train", ["optimizer.lr=1e-4", "drafter.step_decay=0.7"])
    assert (raw.optimizer.lr, raw.drafter.step_decay) == (1e-4, 0.7)
