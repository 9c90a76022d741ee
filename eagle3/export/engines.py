"""What SGLang and vLLM read of a drafter directory, and what they do with the rest: facts for `eagle3.export.check`.

Read in the engines' own sources: SGLang's models/llama_eagle3.py, model_executor/…/spec_aux_hidden_state.py and
speculative/eagle_worker_v2.py; vLLM's models/llama_eagle3.py, v1/worker/gpu_model_runner.py (layer ids) and
v1/spec_decode/llm_base_proposer.py (what is shared with the verifier).
"""

from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from eagle3.export.config import ARCHITECTURE
from extract.numbering import DEFAULT_SGLANG, known_version

ENGINES = ("sglang", "vllm")
VLLM_VERSIONS = ("0.32",)
"""Minor versions of vLLM whose loader was read."""


@dataclass(frozen=True)
class Engine:
    """One version of one engine, as far as its drafter loader goes."""

    kind: str
    """One of `ENGINES`."""
    version: Version
    architectures: tuple[str, ...]
    """Names under which it finds this network."""
    missing: str
    """What it does where a tensor is not in the file."""
    unknown: str
    """What it does with a tensor that it does not look for."""

    @property
    def name(self) -> str:
        return f"{'SGLang' if self.kind == 'sglang' else 'vLLM'} {self.version}"

    def knows(self, since: str) -> bool:
        """Whether it computes what SGLang computes from version `since` on; the vLLM that was read does."""
        return self.kind == "vllm" or self.version >= Version(since)

    def tensor_name(self, name: str) -> str:
        """The drafter's own name of a stored tensor; unchanged where the engine does not look for it."""
        if self.kind == "sglang":
            name = name.removeprefix("model.")
        return name.replace("layers.0.", "midlayer.") if self.knows("0.5.12.post1") else name


def engine_of(kind: str, version: str | None) -> Engine:
    """The engine; without `version` the one that a drafter is written for. ValueError for one that was not read."""
    if kind == "sglang":
        known = Version(known_version(DEFAULT_SGLANG if version is None else version))
        missing, unknown = "leave it random without a word", "skip it without a word"
        return Engine(kind, known, (ARCHITECTURE,), missing, unknown)
    if kind == "vllm":
        # To a name that neither begins nor ends with Eagle3 it adds the prefix by itself.
        architectures = (ARCHITECTURE, "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
        return Engine(kind, _known_vllm(version), architectures, "leave it as memory was", "refuse to start")
    raise ValueError(f"engine {kind!r} is not known; known are {' and '.join(ENGINES)}")


def _known_vllm(version: str | None) -> Version:
    try:
        parsed = Version(VLLM_VERSIONS[-1] + ".0" if version is None else Version(version).public)
    except InvalidVersion:
        raise ValueError(f"vLLM version {version!r} is no version; write it as {VLLM_VERSIONS[-1]}.0") from None
    if ".".join(map(str, parsed.release[:2])) not in VLLM_VERSIONS:
        raise ValueError(
            f"vLLM {version} is not known: how it loads a drafter was read in {', '.join(VLLM_VERSIONS)}; older ones "
            "drop switches of the network without a word"
        )
    return parsed
