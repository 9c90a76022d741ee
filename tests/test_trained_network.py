"""The weights' own word on their network: a config.json that says otherwise is refused, key by key."""

import pytest
from safetensors.torch import load_file, save_file
from tiny import edit_json
from tiny_drafter import ORIGIN, tiny_drafter

from eagle3.export.directory import load_drafter, read_shape, read_vocab, save_drafter


@pytest.fixture
def saved(model, tmp_path):
    return save_drafter(tiny_drafter(model), tmp_path / "drafter", origin=ORIGIN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": 10000.0, "rope_parameters": None}, r"rope_parameters is .*10000.0.*trained with .*5000.0"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, the weights were trained with 1e-05"),
        ({"max_position_embeddings": 4096}, "max_position_embeddings is 4096, the weights were trained with 512"),
        ({"norm_output": True, "eagle_config": None}, "norm_output is True, the weights were trained with False"),
        ({"capture_layers": [2, 3, 5], "eagle_aux_hidden_state_layer_ids": [2, 3, 5], "eagle_config": None},
         r"capture_layers is \(2, 3, 5\), the weights were trained with \(1, 2, 4\)"),
        ({"num_key_value_heads": 4, "head_dim": 4}, "num_key_value_heads is 4, .*with 2; head_dim is 4, .*with 8"),
    ],
)  # fmt: skip
def test_a_config_that_is_not_the_weights_own_is_refused(saved, model, changes, message):
    """Nothing of this shows in a tensor's shape, and the config alone does not contradict itself."""
    edit_json(saved / "config.json", **changes)
    assert read_shape(saved), "config.json by itself is sound"
    with pytest.raises(ValueError, match=f"config.json was changed: .*{message}"):
        load_drafter(saved, model.get_input_embeddings().weight.data)


@pytest.mark.parametrize("said", ["no JSON", "{}", '{"capture_layers": [1]}'])
def test_a_broken_word_of_the_weights_is_refused(saved, said):
    save_file(load_file(saved / "model.safetensors"), saved / "model.safetensors", metadata={"network": said})
    with pytest.raises(ValueError, match=r"model.safetensors: its metadata names no network"):
        read_vocab(saved)
