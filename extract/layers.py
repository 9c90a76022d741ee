"""Which layers of the verifier are captured; capture layer k is the input of decoder layer k (0-based).

That is Hugging Face's `hidden_states[k]`: the residual stream after k decoder layers. Engines number
differently; their numbers are translated elsewhere, so that every file of this project says k.
"""

from collections.abc import Sequence

NUM_CAPTURED = 3


def default_capture_layers(num_layers: int) -> list[int]:
    """An early, a middle and a late layer: [2, n // 2, n - 3], as in EAGLE-3 (https://arxiv.org/abs/2503.01840).

    Raises ValueError for fewer than 7 layers, where the three would coincide: the caller must choose.
    """
    layers = [2, num_layers // 2, num_layers - 3]
    if not (1 <= layers[0] < layers[1] < layers[2]):
        raise ValueError(
            f"verifier.capture_layers: the default [2, n // 2, n - 3] is {layers} for {num_layers} layers, "
            f"which are not three rising layers; {_advice(num_layers)}"
        )
    return layers


def check_capture_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The three layers, ascending; ValueError unless they are distinct and in 1 .. num_layers - 1."""
    if any(isinstance(layer, bool) or not isinstance(layer, int) for layer in layers):
        raise ValueError(f"verifier.capture_layers: {list(layers)} are not whole numbers; {_advice(num_layers)}")
    wrong = sorted(layer for layer in layers if not 1 <= layer <= num_layers - 1)
    if wrong:
        raise ValueError(
            f"verifier.capture_layers: {wrong} of {list(layers)} lie outside 1 .. {num_layers - 1} "
            f"(of {num_layers} layers; k means the input of layer k); {_advice(num_layers)}"
        )
    if len(set(layers)) != len(layers) or len(layers) != NUM_CAPTURED:
        raise ValueError(
            f"verifier.capture_layers: {list(layers)} are not {NUM_CAPTURED} distinct layers; {_advice(num_layers)}"
        )
    return tuple(sorted(layers))


def _advice(num_layers: int) -> str:
    if num_layers <= NUM_CAPTURED:
        return f"a verifier of {num_layers} layers is too shallow: {NUM_CAPTURED + 1} layers are needed at least"
    example = [1, max(2, num_layers // 2), num_layers - 1]
    return f"name {NUM_CAPTURED} distinct layers from 1 to {num_layers - 1}, for example {example}"
