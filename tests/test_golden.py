"""The training classes against golden values of an independent implementation, and that the runner can fail."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.golden.__main__ import main

HERE = Path(__file__).parent / "golden"
FIXTURES = sorted(HERE.glob("*.safetensors"))


def perturbed(source: Path, target: Path, name: str, relative: float, metric: str | None = None) -> Path:
    """A copy in which one tensor differs by `relative` of its norm, and perhaps one metric by 2e-5."""
    with safe_open(source, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - safe_open is no mapping
        metadata = file.metadata()
    noise = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(0))
    tensors[name] = tensors[name] + relative * tensors[name].norm() / noise.norm() * noise
    if metric is not None:
        metrics = json.loads(metadata["metrics"])
        metadata["metrics"] = json.dumps(metrics | {metric: metrics[metric] * (1 + 2e-5) + 1e-12})
    save_file(tensors, target, metadata)
    return target


def test_both_fixtures_are_here():
    assert [path.stem for path in FIXTURES] == ["eagle3_fc_norm", "eagle3_vanilla"]


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_training_classes_agree_with_the_fixture(path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(path)]) == 0
    assert f"{path}: loss and metrics" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "relative"),
    [
        ("g.fc.weight", 3e-4),
        ("w.layers.0.self_attn.k_proj.weight", 1e-2),
        ("w.norm.weight", 1e-3),
        ("b.verifier_last_hidden_states", 1e-3),
    ],
)
def test_runner_exits_1_on_a_perturbed_fixture(
    tmp_path: Path, name: str, relative: float, capsys: pytest.CaptureFixture[str]
):
    path = perturbed(FIXTURES[1], tmp_path / "f.safetensors", name, relative)
    assert main([str(FIXTURES[0]), str(path)]) == 1
    assert "is beyond tolerance" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["loss_0", "loss", "full_acc_1", "cond_acc_2"])
def test_runner_exits_1_where_a_metric_differs(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]):
    path = perturbed(FIXTURES[0], tmp_path / "f.safetensors", "g.fc.weight", 0.0, metric=name)
    assert main([str(path)]) == 1
    assert f"  {name}: " in capsys.readouterr().out


def test_rewriting_alone_changes_nothing(tmp_path: Path):
    assert main([str(perturbed(FIXTURES[1], tmp_path / "f.safetensors", "g.fc.weight", 0.0))]) == 0
