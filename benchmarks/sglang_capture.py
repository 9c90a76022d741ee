"""Capture through SGLang against the same server's prefill without capture: what each step of the way costs.

    python -m benchmarks.sglang_capture --shape llama8b server.python=PYTHON server.flags.attention_backend=triton ...

Weights are random (`--load-format dummy`). In one run, same client, same prompts and requests at once: prefill alone;
states taken and dropped; states into a store in memory; states into a store on disk, to the last fsync. What lies
between two neighbours is what that step costs. Start-up and teacher pass are no part of it.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict
from rich import box, get_console
from rich.table import Table
from transformers import AutoConfig

from benchmarks.record import write_result
from eagle3.config import Config, typed
from extract.engines.base import Captured
from extract.engines.servers import OwnServers
from extract.engines.sglang import SglangEngine
from extract.engines.sglang_command import installed_sglang
from extract.engines.sglang_server import open_sglang
from extract.layers import default_capture_layers
from extract.lazy import LazyEngine
from extract.pipeline import capture_all
from extract.probe import Told
from extract.samples import Sample
from extract.store import create_or_resume
from extract.verifier import VerifierSpec

CONF = Path(__file__).resolve().parents[1] / "conf"
SHAPES: dict[str, dict[str, int]] = {
    "llama8b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 16, "intermediate_size": 128, "vocab_size": 320, "max_position_embeddings": 2048},
}  # fmt: skip


class Unproven(SglangEngine):
    """Random weights are nowhere on disk, so their head cannot be held against the server's log-probabilities."""

    def _note(
        self, name: str, pairs: Sequence[tuple[Captured, Captured]], told: Sequence[Told], dtype: torch.dtype
    ) -> None:
        assert all(a.aux.equal(b.aux) for a, b in pairs) or dtype is torch.bfloat16


def shaped(shape: str, folder: Path) -> VerifierSpec:
    """A Llama of that shape: a config without weights."""
    sizes = SHAPES[shape]
    config = AutoConfig.for_model("llama", **sizes, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return VerifierSpec(
        name=shape, path=folder, sha256="", tokenizer_sha256="", chat_template_sha256="", model_type="llama",
        hidden_size=sizes["hidden_size"], num_layers=sizes["num_hidden_layers"], vocab_size=sizes["vocab_size"],
        num_heads=sizes["num_attention_heads"], num_kv_heads=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"], intermediate_size=sizes["intermediate_size"], rms_norm_eps=1e-6,
        hidden_act="silu", rope_parameters={}, max_position_embeddings=sizes["max_position_embeddings"],
        tied_head=False, end_of_turn_ids=(2,), source=shape, trust_remote_code=False,
    )  # fmt: skip


def settings(overrides: Sequence[str]) -> Config:
    with initialize_config_dir(str(CONF), version_base="1.3", job_name="extract"):
        raw = compose("extract", ["server=sglang", "server.flags.load_format=dummy", *overrides],
                      return_hydra_config=True)  # fmt: skip
    HydraConfig.instance().set_config(raw)
    with open_dict(raw):
        del raw["hydra"]
    return typed(raw)


def prefill_alone(engine: SglangEngine, samples: Sequence[Sample], repeats: int, log_dir: Path) -> list[float]:
    """Seconds with the same flags, without plugin, spool and store; the first time, which compiles, does not count."""

    def ask(sample: Sample) -> dict[str, Any]:
        body = {"input_ids": sample.input_ids, "sampling_params": {"max_new_tokens": 0}}
        return server.ask("POST", "/generate", body)

    seconds = []
    told, dtype = engine.servers.server, str(engine.dtype).removeprefix("torch.")
    with open_sglang(
        told, engine.spec, "capture", dtype=dtype, env={}, log_dir=log_dir, spool=None, wanted=lambda: True
    ) as server:
        for _ in range(repeats + 1):
            began = time.monotonic()
            engine._side_by_side(ask, samples)
            seconds.append(time.monotonic() - began)
    return seconds[1:]


def into_a_store(engine: LazyEngine, spec: VerifierSpec, layers: Sequence[int], samples: Sequence[Sample],
                 batch_tokens: int, folder: Path) -> float:  # fmt: skip
    manifest = {"last": "post_norm", "dtype": "bfloat16", "codec": "none", "capture_layers": list(layers),
                "hidden_size": spec.hidden_size, "must_match": {}}  # fmt: skip
    directory = Path(tempfile.mkdtemp(dir=folder))
    began = time.monotonic()
    with create_or_resume(directory, manifest, shard_bytes=1 << 30) as writer:
        capture_all(engine, samples, writer, total_tokens=sum(len(s.input_ids) for s in samples),
                    batch_tokens=batch_tokens, dtype=torch.bfloat16)  # fmt: skip
    seconds = time.monotonic() - began
    shutil.rmtree(directory)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama8b")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--batch-tokens", type=int, default=1 << 16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--disk", type=Path, default=Path("outputs"))
    parser.add_argument("overrides", nargs="*", help="of the config, as extract.py takes them")
    asked = parser.parse_args()
    config = settings(asked.overrides)
    asked.disk.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        spec = shaped(asked.shape, folder / "verifier")
        layers = default_capture_layers(spec.num_layers)
        servers = OwnServers("own", spec, config.server, version=installed_sglang(config.server)[1],
                             capture_layers=layers, dtype="bfloat16", env=config.hardware.env,
                             log_dir=folder / "log")  # fmt: skip
        engine = Unproven(spec, servers, capture_layers=layers, dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, spec.vocab_size, (asked.samples, asked.length), generator=generator).tolist()
        samples = [Sample(f"s{n}", f"c{n}", row, [1] * len(row), 0.0, 1) for n, row in enumerate(ids)]
        rows = measured(asked, engine, spec, layers, samples, folder)
    show(rows, asked, write_result("sglang_capture", rows, shape=asked.shape, sglang=engine.version))


def measured(asked: argparse.Namespace, engine: Unproven, spec: VerifierSpec, layers: Sequence[int],
             samples: Sequence[Sample], folder: Path) -> list[dict[str, float]]:  # fmt: skip
    """Tokens a second of each way, once a repeat; prefill alone has a server of its own, before the other."""
    tokens = asked.samples * asked.length
    bare = prefill_alone(engine, samples, asked.repeats, folder / "alone")
    lazy = LazyEngine(lambda: engine, "sglang", engine.version, ahead=engine.ahead)
    engine.capture([sample.input_ids for sample in samples[:32]])
    rows, console = [], get_console()
    console.print("prefill: " + ", ".join(f"{tokens / took:,.0f}" for took in bare) + " tokens/s")  # told at once
    for number in range(asked.repeats):
        began = time.monotonic()
        engine.capture([sample.input_ids for sample in samples])
        seconds = {"prefill": bare[number], "taken": time.monotonic() - began}
        for name, where in (("memory", Path("/dev/shm")), ("disk", asked.disk)):
            seconds[name] = into_a_store(lazy, spec, layers, samples, asked.batch_tokens, where)
            console.print(f"{name}: {tokens / seconds[name]:,.0f} tokens/s")
        rows.append({f"{name}_tokens_per_s": tokens / took for name, took in seconds.items()})
    engine.close()
    return rows


def show(rows: Sequence[dict[str, float]], asked: argparse.Namespace, path: Path) -> None:
    table = Table("", "tokens/s", "of prefill", box=box.SIMPLE)
    ways = {"prefill": "prefill, no capture", "taken": "states taken and dropped", "memory": "into a store in memory",
            "disk": "into a store on disk"}  # fmt: skip
    medians = {name: statistics.median(row[f"{name}_tokens_per_s"] for row in rows) for name in ways}
    for name, words in ways.items():
        table.add_row(words, f"{medians[name]:,.0f}", f"{medians[name] / medians['prefill']:.2f}")
    console = get_console()
    console.print(table)
    console.print(json.dumps(medians), f"\nwritten to {path}")


if __name__ == "__main__":
    main()
