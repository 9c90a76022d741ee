"""SGLang's numbers for the captured layers: they mean other layers in other model families and versions.

Everywhere else capture layer k is the input of layer k. SGLang is told a list of ids and makes `layers_to_capture` of
it, by a rule that its models do not share and that has changed twice. A wrong list is served without a word: the
drafter reads other layers than it was trained on. So nothing here is guessed.
"""

from collections.abc import Sequence
from enum import Enum
from itertools import pairwise

from packaging.version import InvalidVersion, Version


class Rule(Enum):
    """What a model's `set_eagle3_layers_to_capture` makes of the ids that it is told."""

    PLUS_ONE = "every id plus one"
    FIRST_ONE = "every id plus one if the first is 1, else unchanged"
    LAST = "every id unchanged if the largest is the number of layers, else plus one"


OLDEST, NEWEST = "0.5.10.post1", "0.5.23"
SGLANG_VERSIONS = (OLDEST, "0.5.12.post1", "0.5.14", "0.5.16", "0.5.18", "0.5.20", NEWEST)
"""Versions whose models were read for the table below, and all that is known."""

DEFAULT_SGLANG = "0.5.16"
"""What a drafter is written for unless another is named: the oldest version that the `sglang` extra allows."""

_PLUS_ONE = (
    "apertus", "exaone_moe", "glm4_moe", "llama", "llama4_text", "longcat_flash", "minimax_m2", "ministral3",
    "mistral", "phi3", "qwen2", "qwen2_5_vl_text", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next",
)  # fmt: skip
_PLUS_ONE_LATER = ("gemma3_text", "gemma4_text", "qwen3_vl_moe_text", "qwen3_vl_text")
_DEEPSEEK = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "kimi_k25",
)  # fmt: skip
_FAMILIES: dict[str, tuple[tuple[str, Rule], ...]] = {
    **dict.fromkeys(_PLUS_ONE, ((OLDEST, Rule.PLUS_ONE),)),
    **dict.fromkeys(_PLUS_ONE_LATER, (("0.5.12.post1", Rule.PLUS_ONE),)),
    **dict.fromkeys(_DEEPSEEK, ((OLDEST, Rule.PLUS_ONE), ("0.5.14", Rule.FIRST_ONE))),  # sgl-project/sglang#25454
    "gpt_oss": ((OLDEST, Rule.PLUS_ONE), ("0.5.18", Rule.LAST)),  # sgl-project/sglang#32334
}
"""Rules by the verifier's `model_type`, each with the first version read that has it."""


def sglang_layer_ids(family: str, version: str, k: Sequence[int]) -> list[int]:
    """The ids to tell SGLang so that it captures exactly the inputs of layers `k`, in that order.

    Args:
        family: `model_type` of the verifier's text model.
        version: of SGLang, e.g. "0.5.16".
        k: capture layers, 1 or more each.

    Raises:
        ValueError: a family or version that is not in the table, or layers that no list says there.
    """
    wanted = list(k)
    if not wanted or min(wanted) < 1:
        raise ValueError(f"capture layers {wanted} cannot be told to SGLang: layers from 1 on are needed")
    # One less comes first: where both lists are right, it is right in the older versions too.
    for ids in ([layer - 1 for layer in wanted], wanted):
        if sglang_captures(family, version, ids) == wanted:
            return ids
    raise ValueError(
        f"capture layers {wanted} cannot be told to SGLang {version} for {family}, which reads "
        f"{_rule(family, version).value}; choose a first layer other than {wanted[0]}"
    )


def sglang_captures(family: str, version: str, ids: Sequence[int], *, num_layers: int | None = None) -> list[int]:
    """`layers_to_capture` of that SGLang when it is told `ids`: the inverse of `sglang_layer_ids`.

    `num_layers` is the verifier's; without it no id is taken for the number of layers itself, which no capture layer
    of this program needs.

    Raises:
        ValueError: a family or version that is not in the table.
    """
    rule = _rule(family, version)
    unchanged = (rule is Rule.FIRST_ONE and list(ids[:1]) != [1]) or (
        rule is Rule.LAST and num_layers is not None and max(ids, default=-1) == num_layers
    )
    return list(ids) if unchanged else [layer + 1 for layer in ids]


def versions_capturing(family: str, ids: Sequence[int], k: Sequence[int]) -> list[str]:
    """All of `SGLANG_VERSIONS` in which `ids` mean the layers `k`; ValueError for a family that is not in the table."""
    return [v for v in _versions_of(family) if sglang_captures(family, v, ids) == list(k)]


def known_version(version: str) -> str:
    """`version` without a local part such as +cu130; ValueError if it is none, or older or newer than what is known."""
    try:
        parsed = Version(Version(version).public)
    except InvalidVersion:
        raise ValueError(f"SGLang version {version!r} is no version; write it as {DEFAULT_SGLANG}") from None
    if not Version(OLDEST) <= parsed <= Version(NEWEST):
        raise ValueError(
            f"SGLang {version} is not known: how it numbers layers was read in {', '.join(SGLANG_VERSIONS)}; use one "
            "of these or one between"
        )
    return str(parsed)


def _rule(family: str, version: str) -> Rule:
    known = _versions_of(family)
    wanted = Version(known_version(version))
    if wanted < Version(known[0]):
        raise ValueError(f"SGLang {version} is not known to capture layers of {family}; {known[0]} does")
    rules = {v: [rule for since, rule in _FAMILIES[family] if Version(since) <= Version(v)][-1] for v in known}
    for older, newer in pairwise(known):
        if Version(older) < wanted < Version(newer) and rules[older] is not rules[newer]:
            raise ValueError(
                f"SGLang {version} is not known for {family}: {older} reads {rules[older].value}, {newer} reads "
                f"{rules[newer].value}; use one of these"
            )
    return rules[max((v for v in known if Version(v) <= wanted), key=Version)]


def _versions_of(family: str) -> list[str]:
    if family not in _FAMILIES:
        raise ValueError(
            f"how SGLang numbers the layers of {family!r} is not known; known verifier families (model_type) are "
            f"{', '.join(sorted(_FAMILIES))}, in SGLang {OLDEST} to {NEWEST}"
        )
    return [v for v in SGLANG_VERSIONS if Version(v) >= Version(_FAMILIES[family][0][0])]
