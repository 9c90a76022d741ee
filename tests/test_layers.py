"""Capture layers: three distinct layers in 1 .. n-1, or one clear error."""

import pytest

from extract.layers import check_capture_layers, default_capture_layers


@pytest.mark.parametrize("num_layers", range(1, 100))
def test_default_layers_are_distinct_or_refused(num_layers):
    if num_layers < 7:
        with pytest.raises(ValueError, match=rf"verifier.capture_layers.* {num_layers} layers"):
            default_capture_layers(num_layers)
        return
    layers = default_capture_layers(num_layers)
    assert layers == [2, num_layers // 2, num_layers - 3]
    assert check_capture_layers(layers, num_layers) == tuple(layers)


def test_default_layers_of_kimi_k25():
    assert default_capture_layers(61) == [2, 30, 58]


@pytest.mark.parametrize(
    ("num_layers", "reason"), [(2, "too shallow"), (4, "for example"), (5, "for example"), (6, "for example")]
)
def test_shallow_verifier_says_what_to_do(num_layers, reason):
    with pytest.raises(ValueError, match=reason):
        default_capture_layers(num_layers)


@pytest.mark.parametrize("layers", [[1, 2, 5], [-1, 2, 3], [0, 1, 2], [1, 1, 2], [1, 2], [1, 2, 3, 4], [1, 2, 3.0]])
def test_wrong_layers_are_refused(layers):
    with pytest.raises(ValueError, match=r"verifier.capture_layers.*for example \[1, 2, 4\]"):
        check_capture_layers(layers, 5)


def test_layers_are_sorted():
    assert check_capture_layers([4, 1, 2], 5) == (1, 2, 4)


@pytest.mark.parametrize("num_layers", range(4, 12))
def test_the_example_in_the_message_is_accepted(num_layers):
    with pytest.raises(ValueError, match="for example") as error:
        check_capture_layers([0, 0, 0], num_layers)
    example = str(error.value).rsplit("[", 1)[1].rstrip("]")
    assert check_capture_layers([int(layer) for layer in example.split(",")], num_layers)
