"""One extraction, opened: verifier, chat, prompts, engine and store manifest, all checked before any work."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from extract.chat import Chat
from extract.config import Extraction, Hardware, Server, Verifier, on_hardware
from extract.dialogue import count_turns
from extract.engines import ENGINES, InProcessEngine
from extract.engines.fleet import plan_fleet
from extract.engines.sglang import SglangEngine
from extract.journal import Journal
from extract.layers import check_capture_layers, default_capture_layers
from extract.lazy import LazyEngine
from extract.manifest import store_manifest
from extract.pipeline import samples_of
from extract.prompts import Conversation, Skipped, read_conversations
from extract.respond import Sampling
from extract.samples import Sample
from extract.store import bytes_per_token, open_store
from extract.store_manifest import differences
from extract.verifier import VerifierSpec, load_tokenizer, resolve_verifier

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    spec: VerifierSpec
    tokenizer: PreTrainedTokenizerBase
    chat: Chat
    conversations: list[Conversation]
    skipped: list[Skipped]
    engine: LazyEngine
    capture_layers: tuple[int, ...]
    sampling: Sampling
    extraction: Extraction
    store: Path
    manifest: dict[str, Any]
    commands: tuple[str, ...]
    """Of the servers that will be started; none for an engine in this process."""

    @property
    def keep_given(self) -> bool:
        return self.extraction.responses == "keep"

    @property
    def token_bytes(self) -> int:
        return bytes_per_token(
            hidden_size=self.spec.hidden_size,
            num_capture_layers=len(self.capture_layers),
            dtype=self.extraction.dtype,
            codec=self.extraction.codec,
        )

    def journal(self) -> Journal:
        return Journal(self.store / "responses.jsonl")

    def samples(self, journal: Journal) -> Iterator[Sample | Skipped]:
        return samples_of(journal, self.conversations, max_len=self.extraction.max_len)

    def outlook(self) -> dict[str, int]:
        """What is known before anything is generated; `at_most` bytes are left to write."""
        known = self._known_answers()
        written = sum(file.stat().st_size for file in (self.store / "shards").glob("*.safetensors"))
        most = len(self.conversations) * self.extraction.max_len * self.token_bytes
        return {
            "conversations": len(self.conversations),
            "skipped": len(self.skipped),
            "turns": count_turns(self.conversations, keep_given=self.keep_given),
            "known": known,
            "at_most": max(0, most - written),
        }

    def _known_answers(self) -> int:
        """Finished lines of the journal, one after another and without opening it for writing."""
        path = self.store / "responses.jsonl"
        if not path.exists():
            return 0
        with path.open("rb") as file:
            return sum(line.endswith(b"\n") for line in file)

    def is_done(self) -> bool:
        """Whether the store is complete, teacher pass included, and this very extraction's."""
        try:
            store = open_store(self.store)
        except ValueError:
            return False  # there is none, or it is damaged: whoever writes it says what, and mends what can be mended
        return bool(store.manifest["complete"]) and store.has_teacher and not differences(store.manifest, self.manifest)


def open_verifier(verifier: Verifier, cache_dir: Path) -> VerifierSpec:
    """The verifier that the config names, without its weights."""
    return resolve_verifier(
        verifier.path, name=verifier.name, cache_dir=cache_dir, chat_template=verifier.chat_template,
        trust_remote_code=verifier.trust_remote_code, revision=verifier.revision,
    )  # fmt: skip


def open_job(
    verifier: Verifier, server: Server, extraction: Extraction, hardware: Hardware, store: Path, *,
    cache_dir: Path, seed: int,
) -> Job:  # fmt: skip
    """Reads and checks everything but weights.

    Raises:
        ValueError: naming file, key or sample, and the remedy.
    """
    if server.engine not in (*ENGINES, SglangEngine.name):
        raise ValueError(
            f"server.engine={server.engine} cannot capture hidden states; extract with server=inprocess, and judge the "
            f"drafter in that engine: evaluate.py server={server.engine}"
        )
    if extraction.temperature > 0 or extraction.responses == "keep":
        log.warning(
            "acceptance length is defined on the verifier's greedy responses, and train.py refuses a store whose "
            "validation split has none: extraction.temperature=%s with extraction.responses=%s gives none for "
            "prompts that are answered already or by sampling",
            extraction.temperature,
            extraction.responses,
        )
    if store.exists() and not store.is_dir():
        raise ValueError(f"store={store}: {store.absolute()} is a file; name a directory")
    conversations, skipped = read_conversations(
        extraction.prompts, split=extraction.split, limit=extraction.limit, system_prompt=extraction.system_prompt
    )
    spec = open_verifier(verifier, cache_dir)
    if extraction.max_len > spec.max_position_embeddings:
        raise ValueError(
            f"extraction.max_len={extraction.max_len} exceeds the {spec.max_position_embeddings} positions of "
            f"{spec.name}; lower it"
        )
    tokenizer = load_tokenizer(spec)
    layers = check_capture_layers(verifier.capture_layers or default_capture_layers(spec.num_layers), spec.num_layers)
    engine, commands = _engine(spec, verifier.dtype, layers, server, hardware, store / "server")
    sampling = Sampling(extraction.max_new_tokens, extraction.temperature, extraction.top_p, seed)
    manifest = store_manifest(
        spec, extraction, sampling, capture_layers=layers, engine=engine.name, engine_version=engine.version,
        dtype=verifier.dtype,
    )  # fmt: skip
    chat = Chat(tokenizer, spec.end_of_turn_ids, spec.vocab_size)
    return Job(spec, tokenizer, chat, conversations, skipped, engine, layers, sampling, extraction, store, manifest,
               commands)  # fmt: skip


def _engine(
    spec: VerifierSpec, dtype: str, layers: tuple[int, ...], server: Server, hardware: Hardware, log_dir: Path
) -> tuple[LazyEngine, tuple[str, ...]]:
    """The engine, not yet started, and the commands that will start it. ValueError if it cannot be."""
    if server.engine == "inprocess":
        return LazyEngine(
            lambda: InProcessEngine(
                spec, capture_layers=layers, dtype=getattr(torch, dtype), device=hardware.accelerator
            ),
            InProcessEngine.name, InProcessEngine.version,
        ), ()  # fmt: skip
    server = on_hardware(server, hardware)
    fleet = plan_fleet(spec, server, capture_layers=layers, dtype=dtype, env=hardware.env, log_dir=log_dir)
    engine = LazyEngine(fleet.start, SglangEngine.name, fleet.version, ahead=fleet.ahead, rechecks=True)
    return engine, fleet.commands
