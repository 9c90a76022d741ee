"""SGLang's layer ids: for every family and version, what the engine makes of our list is exactly the layers wanted.

The engines' own methods stand here as they are in SGLang, apart from the table that is tested.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from extract.numbering import (
    DEFAULT_SGLANG,
    NEWEST,
    OLDEST,
    SGLANG_VERSIONS,
    known_version,
    sglang_captures,
    sglang_layer_ids,
    versions_capturing,
)


def plus_one(layer_ids, num_layers):
    """models/llama.py, qwen2.py, qwen3_moe.py … of every version; deepseek_v2.py to 0.5.12; gpt_oss.py to 0.5.16."""
    return [val + 1 for val in layer_ids]


def deepseek(layer_ids, num_layers):
    """models/deepseek_v2.py from 0.5.14 on, which serves DeepSeek, Kimi-K2 and Kimi-K2.5."""
    if layer_ids and layer_ids[0] == 1:
        return [val + 1 for val in layer_ids]
    return list(layer_ids)


def gpt_oss(layer_ids, num_layers):
    """models/gpt_oss.py from 0.5.18 on."""
    if layer_ids and max(layer_ids) == num_layers:
        return list(layer_ids)
    return [val + 1 for val in layer_ids]


FAMILIES = {
    "llama": 32, "mistral": 40, "qwen2": 28, "qwen3": 36, "qwen3_moe": 48, "qwen3_next": 48, "glm4_moe": 46,
    "minimax_m2": 62, "gemma3_text": 34, "gpt_oss": 24, "deepseek_v2": 27, "deepseek_v3": 61, "kimi_k2": 61,
    "kimi_k25": 61,
}  # fmt: skip
"""Family and the number of layers of one of its models."""
DEEPSEEK = ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25")


def engine(family, version):
    if family in DEEPSEEK and Version(version) >= Version("0.5.14"):
        return deepseek
    return gpt_oss if family == "gpt_oss" and Version(version) >= Version("0.5.18") else plus_one


def pairs():
    return [(f, v) for f in FAMILIES for v in SGLANG_VERSIONS if (f, v) != ("gemma3_text", OLDEST)]


def layer_lists(num_layers):
    """The default, the default one up, the last layers, and lists that do not begin with 2."""
    default = [2, num_layers // 2, num_layers - 3]
    return [default, [k + 1 for k in default], [3, num_layers - 2, num_layers - 1], [5, 9, 14], [2, 3, 4]]


@pytest.mark.parametrize(("family", "version"), pairs())
def test_the_engine_captures_exactly_the_layers_that_are_wanted(family, version):
    n = FAMILIES[family]
    for k in layer_lists(n):
        ids = sglang_layer_ids(family, version, k)
        assert engine(family, version)(ids, n) == k == sglang_captures(family, version, ids, num_layers=n)


@pytest.mark.parametrize(("family", "version"), pairs())
def test_captures_mirrors_the_engine_for_any_list(family, version):
    n = FAMILIES[family]
    for ids in ([1, 5, 9], [2, 5, 9], [0, 5, 9], [3, 4, n - 1], [3, 4, n], [n, 1, 2], [5], []):
        assert sglang_captures(family, version, ids, num_layers=n) == engine(family, version)(ids, n)


@given(
    pair=st.sampled_from(pairs()),
    k=st.lists(st.integers(1, 26), min_size=1, max_size=4, unique=True).map(sorted),
)
def test_a_list_is_right_or_refused(pair, k):
    family, version = pair
    n = max(FAMILIES[family], 27)
    try:
        ids = sglang_layer_ids(family, version, k)
    except ValueError:
        assert engine(family, version) is deepseek and k[0] == 1, "nothing else cannot be said"
    else:
        assert engine(family, version)(ids, n) == k


@pytest.mark.parametrize(
    ("family", "version", "k", "ids"),
    [
        ("llama", "0.5.16", [2, 15, 27], [1, 14, 26]),
        ("kimi_k25", "0.5.12.post1", [2, 30, 58], [1, 29, 57]),
        ("kimi_k25", "0.5.16", [2, 30, 58], [1, 29, 57]),
        ("kimi_k25", "0.5.12.post1", [3, 31, 59], [2, 30, 58]),
        ("kimi_k25", "0.5.16", [3, 31, 59], [3, 31, 59]),
        ("deepseek_v3", "0.5.23", [1 + 2, 30, 58], [3, 30, 58]),
        ("gpt_oss", "0.5.23", [2, 12, 21], [1, 11, 20]),
    ],
)
def test_known_lists(family, version, k, ids):
    assert sglang_layer_ids(family, version, k) == ids


def test_the_same_ids_mean_other_layers_after_an_upgrade():
    """Why a directory says for which versions it was written: the list of one is off by a layer in the other."""
    old = sglang_layer_ids("kimi_k25", "0.5.12.post1", [3, 31, 59])
    assert sglang_captures("kimi_k25", "0.5.14", old) == [2, 30, 58]
    assert versions_capturing("kimi_k25", old, [3, 31, 59]) == [OLDEST, "0.5.12.post1"]
    assert versions_capturing("kimi_k25", [1, 29, 57], [2, 30, 58]) == list(SGLANG_VERSIONS)


@pytest.mark.parametrize("version", ["0.5.14", "0.5.16", NEWEST])
def test_layers_that_no_list_says_are_refused(version):
    with pytest.raises(
        ValueError, match=rf"\[1, 30, 58\] cannot be told to SGLang {version} for kimi_k25.*other than 1"
    ):
        sglang_layer_ids("kimi_k25", version, [1, 30, 58])
    assert sglang_layer_ids("llama", version, [1, 30, 58]) == [0, 29, 57]


@pytest.mark.parametrize("k", [[], [0, 5, 9], [-1, 2, 3]])
def test_layers_below_the_first_are_refused(k):
    with pytest.raises(ValueError, match="layers from 1 on are needed"):
        sglang_layer_ids("deepseek_v3", "0.5.16", k)


@pytest.mark.parametrize(
    ("family", "version", "message"),
    [
        ("zamba2", "0.5.16", "'zamba2' is not known; known .* kimi_k25.* llama.*0.5.10.post1 to 0.5.23"),
        ("llama", "0.5.24", r"SGLang 0.5.24 is not known: .*0.5.10.post1, .*0.5.23"),
        ("llama", "0.4.9", "SGLang 0.4.9 is not known"),
        ("llama", "newest", "'newest' is no version; write it as 0.5.16"),
        ("kimi_k2", "0.5.13", "0.5.13 is not known for kimi_k2: 0.5.12.post1 reads .*, 0.5.14 reads"),
        ("gpt_oss", "0.5.17", "0.5.17 is not known for gpt_oss: 0.5.16 reads .*, 0.5.18 reads"),
        ("gemma3_text", "0.5.11", "0.5.11 is not known to capture layers of gemma3_text; 0.5.12.post1 does"),
    ],
)
def test_what_is_not_in_the_table_is_never_guessed(family, version, message):
    for call in (sglang_layer_ids, sglang_captures):
        with pytest.raises(ValueError, match=message):
            call(family, version, [2, 5, 9])


def test_a_version_between_two_that_agree_is_known():
    assert sglang_layer_ids("llama", "0.5.17+cu130", [2, 5, 9]) == [1, 4, 8]
    assert sglang_layer_ids("kimi_k25", "0.5.22", [3, 5, 9]) == [3, 5, 9]
    assert known_version("0.5.17+cu130") == "0.5.17"
    assert DEFAULT_SGLANG in SGLANG_VERSIONS
