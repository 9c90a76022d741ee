"""What a store says of itself: everything that must agree before more is written to it, and where it came from."""

from collections.abc import Sequence
from typing import Any

from extract.config import Extraction
from extract.prompt_files import source_sha256
from extract.respond import Sampling
from extract.verifier import VerifierSpec


def store_manifest(
    spec: VerifierSpec,
    extraction: Extraction,
    sampling: Sampling,
    *,
    capture_layers: Sequence[int],
    engine: str,
    engine_version: str,
    dtype: str,
) -> dict[str, Any]:
    """The manifest of a new store; `must_match` holds what decides its contents."""
    verifier = {
        "name": spec.name,
        "source": spec.source,
        "sha256": spec.sha256,
        "tokenizer_sha256": spec.tokenizer_sha256,
        "chat_template_sha256": spec.chat_template_sha256,
        "dtype": dtype,
    }
    prompts = {
        "source": extraction.prompts,
        "sha256": source_sha256(extraction.prompts, split=extraction.split),
        "split": extraction.split,
        "limit": extraction.limit,
        "system_prompt": extraction.system_prompt,
        "responses": extraction.responses,
        "max_len": extraction.max_len,
    }
    return {
        "last": "post_norm",
        "dtype": extraction.dtype,
        "codec": extraction.codec,
        "capture_layers": list(capture_layers),
        "hidden_size": spec.hidden_size,
        "verifier": verifier | {"vocab_size": spec.vocab_size, "num_layers": spec.num_layers},
        "engine": {"name": engine, "version": engine_version},
        "must_match": {
            # Where the weights lie may change; what they are may not.
            "verifier": {key: value for key, value in verifier.items() if key not in ("name", "source")},
            "prompts": {key: value for key, value in prompts.items() if key != "source"},
            "sampling": vars(sampling) | {"temperature": float(sampling.temperature)},
            "engine": engine,
        },
        "prompts": prompts,
    }
