"""An evaluation, from config to report: prompts, verifier and drafter are opened, checked and put to work."""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eagle3 import replayed, served
from eagle3.config import Config
from eagle3.drafter import Eagle3Drafter
from eagle3.evaluate import Settings, evaluate
from eagle3.export.check import check
from eagle3.export.directory import load_drafter
from eagle3.questions import ChatQuestions, Prompt, refuse_trained
from eagle3.report import Report
from eagle3.served_report import ServedReport, make_served_report
from eagle3.served_sglang import SglangJudge, SglangJudges, sglang_judges
from eagle3.serving.report import show_line
from eagle3.suspects import Suspect, Text, suspects
from extract.chat import Chat
from extract.config import on_hardware
from extract.engines.vllm import VllmServer, open_vllm
from extract.progress import Progress, closing_table
from extract.prompts import read_conversations
from extract.store import open_store
from extract.verifier import VerifierSpec, load_model, load_tokenizer

log = logging.getLogger(__name__)


def measure_in_process(config: Config, spec: VerifierSpec, drafter_dir: Path, run_dir: Path) -> Report:
    """Decodes every prompt in float32, plainly and with the drafter, and replays the result."""
    questions = _questions(config, spec)
    model, drafter = _load(config, spec, drafter_dir)
    check_prompts = _refuse_trained(Path(config.store))
    with Progress("evaluate", questions.total, unit="prompts") as progress:
        return evaluate(
            model, drafter, questions, _settings(config, spec), check_prompts=check_prompts, advance=progress.advance
        )


def measure_in_vllm(config: Config, spec: VerifierSpec, drafter_dir: Path, run_dir: Path) -> ServedReport:
    """Asks vLLM without and with the drafter, then judges its text and its counts in process.

    Raises:
        ValueError: vLLM would read the drafter directory otherwise than it was meant.
    """
    if faults := check(drafter_dir, "vllm"):
        raise ValueError("\n  ".join([f"{drafter_dir} cannot be judged in vLLM:", *map(str, faults)]))
    server, drafts = on_hardware(config.server, config.hardware), config.evaluation.drafts

    def start(with_drafter: bool) -> VllmServer:
        return open_vllm(
            server, spec, dtype=config.verifier.dtype,
            drafter=drafter_dir if with_drafter else None, drafts=drafts if with_drafter else None,
            log_dir=run_dir / _life("vllm", with_drafter),
        )  # fmt: skip

    return _measure_served(config, spec, drafter_dir, "vLLM", start)


def measure_in_sglang(config: Config, spec: VerifierSpec, drafter_dir: Path, run_dir: Path) -> ServedReport:
    """Asks SGLang without and with the drafter, then judges its text and its counts in process.

    Raises:
        ValueError: this SGLang would read the drafter directory otherwise than it was meant.
    """
    judges = judges_of(config, spec, drafter_dir)

    def start(with_drafter: bool) -> AbstractContextManager[SglangJudge]:
        return judges.started(with_drafter, run_dir / _life("sglang", with_drafter))

    return _measure_served(config, spec, drafter_dir, "SGLang", start)


def show_plan(config: Config, spec: VerifierSpec, drafter_dir: Path) -> None:
    """What an evaluation would decode; for SGLang with both command lines, after the drafter was held against it."""
    prompts = f"{config.evaluation.prompts}, at most {config.evaluation.max_new_tokens} tokens each"
    closing_table("Plan", [("drafter", str(drafter_dir)), ("verifier", spec.name), ("prompts", prompts)], None)
    if config.server.engine == "sglang":
        judges = judges_of(config, spec, drafter_dir)
        for with_drafter in (False, True):
            show_line(judges.line(with_drafter))


def judges_of(config: Config, spec: VerifierSpec, drafter_dir: Path) -> SglangJudges:
    """The two SGLang servers of an evaluation, neither of them started; ValueError as `sglang_judges`."""
    return sglang_judges(
        on_hardware(config.server, config.hardware), spec, drafter_dir, config.evaluation.drafts,
        dtype=config.verifier.dtype, env=config.hardware.env,
    )  # fmt: skip


def _life(engine: str, with_drafter: bool) -> str:
    return f"{engine}_with_drafter" if with_drafter else f"{engine}_alone"


def _measure_served(
    config: Config, spec: VerifierSpec, drafter_dir: Path, engine: str, start: served.Start
) -> ServedReport:
    settings, questions = _settings(config, spec), _questions(config, spec)
    answers = served.answer(start, questions, settings, _refuse_trained(Path(config.store)), _told)
    model, drafter = _load(config, spec, drafter_dir)
    as_served = None if config.verifier.dtype == "float32" else cache(partial(_load_as_served, config, spec))
    with _told("judge", len(answers.prompts)) as advance:
        judged = served.judge(model, drafter, answers.prompts, settings, as_served, advance)
    texts = [(j.result.prompt_ids, j.result.response_ids) for j in judged]

    def find_suspects() -> list[Suspect]:
        recapture = partial(_recapture, model)
        return suspects(drafter, texts, recapture, settings.drafts, spec.num_layers)

    return make_served_report(
        f"{engine} {answers.version}", judged, answers.raw, find_suspects=find_suspects,
        drafts=settings.drafts, resamples=settings.bootstrap, seed=settings.seed,
    )  # fmt: skip


def _load_as_served(config: Config, spec: VerifierSpec) -> PreTrainedModel:
    return load_model(spec, dtype=getattr(torch, config.verifier.dtype), device=config.hardware.accelerator)


def _recapture(model: PreTrainedModel, text: Text, layers: Sequence[int]) -> replayed.Capture:
    return replayed.capture(model, *text, layers)


MEASURES = {"inprocess": measure_in_process, "vllm": measure_in_vllm, "sglang": measure_in_sglang}
"""How an evaluation is done, by the name that `server.engine` gives."""


def _questions(config: Config, spec: VerifierSpec) -> ChatQuestions:
    wanted = config.evaluation
    conversations, _ = read_conversations(
        wanted.prompts, split=None, limit=wanted.limit, system_prompt=config.extraction.system_prompt
    )
    chat = Chat(load_tokenizer(spec), spec.end_of_turn_ids, spec.vocab_size)
    room = spec.max_position_embeddings - wanted.max_new_tokens
    return ChatQuestions(conversations, chat, max_prompt=room)


def _settings(config: Config, spec: VerifierSpec) -> Settings:
    wanted = config.evaluation
    return Settings(
        drafts=wanted.drafts, max_new_tokens=wanted.max_new_tokens, end_of_turn_ids=frozenset(spec.end_of_turn_ids),
        bootstrap=wanted.bootstrap, seed=config.seed,
    )  # fmt: skip


def _load(config: Config, spec: VerifierSpec, drafter_dir: Path) -> tuple[PreTrainedModel, Eagle3Drafter]:
    device = config.hardware.accelerator
    model = load_model(spec, dtype=torch.float32, device=device)
    embedding = cast(Tensor, model.get_input_embeddings().weight)
    return model, load_drafter(drafter_dir, embedding.detach()).to(device)


def _refuse_trained(store: Path) -> Callable[[Collection[Prompt]], None]:
    if not (store / "manifest.json").exists():
        log.warning("%s is no store: whether these prompts were trained on is not checked", store.absolute())
        return lambda prompts: None
    trained_on = open_store(store)
    return lambda prompts: refuse_trained(prompts, trained_on)


@contextmanager
def _told(title: str, total: int) -> Iterator[Callable[..., None]]:
    with Progress(title, total, unit="prompts") as progress:
        yield progress.advance
