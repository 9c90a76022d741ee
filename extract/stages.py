"""The three stages of an opened extraction, as extract.py runs them one after another."""

import random
from collections.abc import Sequence

import torch

from extract.engines import Captured
from extract.job import Job
from extract.journal import Journal
from extract.pipeline import StageFigures, answer_all, capture_all, plan_capture, teach_all
from extract.prompts import Skipped
from extract.report import show_capture_plan
from extract.samples import Sample, require_supervision
from extract.store import StoreWriter, open_store
from extract.store_codec import FP8
from extract.verifier import load_head

PROVEN_SHARE, PROVEN_AT_LEAST = 0.001, 4
"""Of the stored samples, and in any case."""


def respond_stage(job: Job, journal: Journal) -> tuple[StageFigures, list[Skipped]]:
    """Every answer that is missing, into the journal; and the conversations that got none."""
    return answer_all(
        job.engine, job.chat, job.conversations, journal, sampling=job.sampling, verifier_sha256=job.spec.sha256,
        max_len=job.extraction.max_len, concurrency=job.extraction.concurrency, keep_given=job.keep_given,
    )  # fmt: skip


def capture_stage(job: Job, journal: Journal, writer: StoreWriter, unanswered: Sequence[Skipped]) -> StageFigures:
    """Plans and shows what is to be captured, then captures what the store lacks and declares it complete.

    Raises:
        ValueError: (nearly) no sample has a token written by the assistant.
    """
    why = f"the first left out is {unanswered[0].id}: {unanswered[0].reason}; " if unanswered else ""
    samples = job.samples(journal)
    if job.engine.rechecks and not is_proven(writer):
        samples = job.engine.meanwhile(samples)  # a large verifier loads for minutes
    plan = plan_capture(samples, f"{why}look at the prompts and the chat template")
    require_supervision(len(plan.ids), [*unanswered, *plan.skipped])
    needed = plan.tokens * job.token_bytes
    show_capture_plan(job.store, plan, unanswered, job.tokenizer, needed=needed, layers=job.capture_layers)
    figures = capture_all(
        job.engine,
        (sample for sample in job.samples(journal) if isinstance(sample, Sample)),
        writer,
        total_tokens=plan.tokens,
        batch_tokens=job.extraction.capture_tokens,
        dtype=getattr(torch, job.extraction.dtype),
    )
    prove(job, writer, plan.ids)
    writer.finish(plan.ids)
    return figures


def prove(job: Job, writer: StoreWriter, ids: Sequence[str]) -> None:
    """Extracts a few stored samples again, each alone; the figures go into the manifest, unless they are there.

    Raises:
        EngineError: they come out otherwise.
    """
    if not job.engine.rechecks or not writer.done or is_proven(writer):
        return
    store, planned = open_store(job.store), set(ids)
    mine = [ref for ref in store.samples if ref.id in planned]
    count = min(len(mine), max(PROVEN_AT_LEAST, round(PROVEN_SHARE * len(mine))))
    stored = []
    for ref in random.Random(job.sampling.seed).sample(mine, count):
        found = store.read(ref, ("input_ids", "aux", "last"))
        stored.append((found["input_ids"].tolist(), Captured(found["aux"], found["last"])))
    coarsest = FP8 if job.extraction.codec == "fp8" else getattr(torch, job.extraction.dtype)
    writer.manifest["probes"] = job.engine.recheck(stored, coarsest)


def is_proven(writer: StoreWriter) -> bool:
    """Whether an earlier run has captured everything and proven it: no server is needed any more."""
    return bool(writer.manifest["complete"]) and "probes" in writer.manifest


def teacher_stage(job: Job, device: str) -> StageFigures:
    """The finishing pass over the stored states, after the engine has let go of its memory."""
    tokens = open_store(job.store).manifest["counts"]["tokens"]
    return teach_all(
        job.store, load_head(job.spec), total_tokens=tokens, device=device, chunk_tokens=job.extraction.capture_tokens
    )
