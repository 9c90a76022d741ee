"""The training classes and the reference against golden values, and that the runner takes other files and can fail."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.golden.__main__ import main, plain_reference
from tests.golden.fixture import Fixture, save

HERE = Path(__file__).parent / "golden"
FIXTURES = sorted(HERE.glob("*.safetensors"))
SIZES = {
    "wide heads": {"hidden": 20, "heads": 6, "kv": 3, "head_dim": 10, "vocab": 70, "draft": 41, "steps": 6},
    "one step, D = V": {"hidden": 12, "heads": 2, "kv": 1, "head_dim": 6, "vocab": 15, "draft": 15, "steps": 1},
    "EAGLE-3.1": {"hidden": 16, "heads": 4, "kv": 4, "head_dim": 4, "vocab": 33, "draft": 20, "steps": 7, "new": True},
    "five layers": {"hidden": 8, "heads": 1, "kv": 1, "head_dim": 2, "vocab": 9, "draft": 4, "steps": 3, "layers": 5},
}


def made(*, hidden: int, heads: int, kv: int, head_dim: int, vocab: int, draft: int, steps: int, layers: int = 3,
         new: bool = False, lengths: tuple[int, ...] = (1, 2, 9, 3, 14), slots: int = 34, seed: int = 5,
         decay: float = 0.55) -> Fixture:  # fmt: skip
    """A fixture with random weights and states, whose values are the reference's."""
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int, scale: float = 0.3, mean: float = 0.0) -> torch.Tensor:
        return mean + scale * torch.randn(size, generator=generator)

    norms = ["norm", "verifier_norm", *(f"midlayer.{n}" for n in ("input_layernorm", "hidden_norm"))]
    norms += ["midlayer.post_attention_layernorm", *(f"fc_norm.{i}" for i in range(layers) if new)]
    wide, inner, attention, mlp = 2 * hidden, hidden + 7, "midlayer.self_attn", "midlayer.mlp"
    shapes = {
        "fc": (hidden, layers * hidden), "embed_tokens": (vocab, hidden), "lm_head": (draft, hidden),
        "verifier_lm_head": (draft, hidden), f"{attention}.q_proj": (heads * head_dim, wide),
        f"{attention}.k_proj": (kv * head_dim, wide), f"{attention}.v_proj": (kv * head_dim, wide),
        f"{attention}.o_proj": (hidden, heads * head_dim), f"{mlp}.gate_proj": (inner, hidden),
        f"{mlp}.up_proj": (inner, hidden), f"{mlp}.down_proj": (hidden, inner),
    }  # fmt: skip
    weights = {f"{name}.weight": random(hidden, mean=1.0) for name in norms}
    weights |= {f"{name}.weight": random(*size) for name, size in shapes.items()}
    kept = torch.randperm(vocab, generator=generator)[:draft].sort().values
    weights |= {"d2t": kept - torch.arange(draft), "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, kept, 1)}
    batch = packed_row(lengths, slots, vocab, generator) | {
        "hidden_states": random(1, slots, layers * hidden, scale=1.0),
        "verifier_last_hidden_states": random(1, slots, hidden, scale=1.0),
    }
    case = {
        "layers": 1, "sliding": None, "ttt_steps": steps, "decay": decay, "heads": heads, "kv": kv,
        "head_dim": head_dim, "eps": 1e-6, "theta": 1e4, **({"fc_norm": True, "norm_output": True} if new else {}),
    }  # fmt: skip
    bare = Fixture(weights, batch, {}, {"fc_norm": False, "norm_output": False} | case, {})
    metrics, gradients = plain_reference(bare)
    return replace(bare, case=case, metrics=metrics, gradients=gradients)


def packed_row(lengths: tuple[int, ...], slots: int, vocab: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Documents of these lengths and padding behind them; about half of the tokens are supervised."""
    padding = slots - sum(lengths)
    numbers = [n for n, length in enumerate(lengths) for _ in range(length)] + [-1] * padding
    positions = [1 + i for length in lengths for i in range(length)] + [0] * padding
    supervised = torch.rand(slots, generator=generator) < 0.6
    return {
        "document_ids": torch.tensor([numbers]),
        "position_ids": torch.tensor([positions]),
        "input_ids": torch.randint(vocab, (1, slots), generator=generator),
        "loss_mask": (supervised & (torch.tensor(numbers) >= 0)).long()[None],
    }


def perturbed(source: Path, target: Path, name: str, relative: float, **metrics: float) -> Path:
    """A copy in which one tensor differs by `relative` of its norm, and metrics by a factor."""
    with safe_open(source, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - safe_open is no mapping
        metadata = file.metadata()
    noise = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(0))
    tensors[name] = tensors[name] + relative * tensors[name].norm() / noise.norm() * noise
    told = json.loads(metadata["metrics"])
    metadata["metrics"] = json.dumps(told | {key: told[key] * factor + 1e-12 for key, factor in metrics.items()})
    save_file(tensors, target, metadata)
    return target


def test_both_fixtures_are_here():
    assert [path.stem for path in FIXTURES] == ["eagle3_fc_norm", "eagle3_vanilla"]


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_training_classes_and_reference_agree_with_the_fixture(path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(path)]) == 0
    told = capsys.readouterr().out
    assert f"{path}: training classes: loss " in told and f"{path}: reference: loss " in told


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_any_file_of_the_format_will_do(tmp_path: Path, sizes: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    fixture = made(**sizes)
    assert len(fixture.gradients) == len(fixture.weights) - 5 and fixture.metrics["loss"] > 0.1
    assert {name for name in fixture.metrics if name.startswith("loss_")} == {
        f"loss_{k}" for k in range(sizes["steps"])
    }
    path = save(tmp_path / "f.safetensors", fixture)
    assert main([str(path), str(FIXTURES[0])]) == 0
    assert capsys.readouterr().out.count(": loss ") == 4
    other = perturbed(path, tmp_path / "g.safetensors", "w.layers.0.self_attn.o_proj.weight", 1e-2)
    assert main([str(path), str(other)]) == 1


def test_a_step_at_which_nothing_is_supervised_gives_no_rate(tmp_path: Path):
    fixture = made(**SIZES["five layers"] | {"lengths": (2,), "slots": 2})
    assert fixture.metrics["loss_2"] == 0.0 and "full_acc_2" not in fixture.metrics
    assert main([str(save(tmp_path / "f.safetensors", fixture))]) == 0


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
    path = perturbed(FIXTURES[0], tmp_path / "f.safetensors", "g.fc.weight", 0.0, **{name: 1 + 2e-5})
    assert main([str(path)]) == 1
    assert f"  {name}: " in capsys.readouterr().out


def test_runner_exits_1_on_a_gradient_that_is_not_finite(tmp_path: Path):
    path = perturbed(FIXTURES[0], tmp_path / "f.safetensors", "g.fc.weight", float("nan"))
    assert main([str(path)]) == 1


@pytest.mark.parametrize(("key", "value"), [("layers", 2), ("sliding", 5), ("norm_before_residual", True)])
def test_a_case_of_another_network_is_refused_by_name(
    tmp_path: Path, key: str, value: object, capsys: pytest.CaptureFixture[str]
):
    fixture = made(**SIZES["one step, D = V"])
    path = save(tmp_path / "f.safetensors", replace(fixture, case=fixture.case | {key: value}))
    assert main([str(path)]) == 1
    assert f"{key} is {value} in this case" in capsys.readouterr().out


def test_rewriting_alone_changes_nothing(tmp_path: Path):
    assert main([str(perturbed(FIXTURES[1], tmp_path / "f.safetensors", "g.fc.weight", 0.0))]) == 0
