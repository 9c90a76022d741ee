"""An evaluation, from config to report: prompts, verifier and drafter are opened, checked and put to work."""

import logging
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from eagle3.config import Config
from eagle3.evaluate import Settings, evaluate
from eagle3.export import load_drafter
from eagle3.questions import ChatQuestions, refuse_trained
from eagle3.report import Report
from extract.chat import Chat
from extract.progress import Progress
from extract.prompts import read_conversations
from extract.store import open_store
from extract.verifier import VerifierSpec, load_model, load_tokenizer

log = logging.getLogger(__name__)


def measure(config: Config, spec: VerifierSpec, drafter_dir: Path) -> Report:
    """Decodes every prompt in float32, plainly and with the drafter, and replays the result."""
    wanted = config.evaluation
    conversations, _ = read_conversations(
        wanted.prompts, split=None, limit=wanted.limit, system_prompt=config.extraction.system_prompt
    )
    chat = Chat(load_tokenizer(spec), spec.end_of_turn_ids, spec.vocab_size)
    room = spec.max_position_embeddings - wanted.max_new_tokens
    questions = ChatQuestions(conversations, chat, max_prompt=room)
    model = load_model(spec, dtype=torch.float32, device=config.hardware.accelerator)
    embedding = cast(Tensor, model.get_input_embeddings().weight)
    drafter = load_drafter(drafter_dir, embedding.detach()).to(config.hardware.accelerator)
    settings = Settings(
        drafts=wanted.drafts, max_new_tokens=wanted.max_new_tokens, end_of_turn_ids=frozenset(spec.end_of_turn_ids),
        bootstrap=wanted.bootstrap, seed=config.seed,
    )  # fmt: skip
    store = Path(config.store)
    trained_on = open_store(store) if (store / "manifest.json").exists() else None
    if trained_on is None:
        log.warning("%s is no store: whether these prompts were trained on is not checked", store.absolute())
    with Progress("evaluate", questions.total, unit="prompts") as progress:
        return evaluate(
            model, drafter, questions, settings, advance=progress.advance,
            check_prompts=lambda prompts: refuse_trained(prompts, trained_on) if trained_on else None,
        )  # fmt: skip
