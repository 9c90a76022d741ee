"""Tells a loaded model which layers to capture, and hooks the one place that sees all states of a forward pass.

SGLang logs what goes wrong in a plugin and serves on; an exception in here ends the server instead, and a file READY
of every rank says that all went well.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import VARIABLE
from .states import Capture
from .writer import Writer

INNER = ("language_model", "llm", "thinker")
"""Where models that also see or hear keep their language model."""


def after_load(result: Any, runner: Any, *_args: Any, **_kwargs: Any) -> None:
    """Runs after `ModelRunner.load_model`, on every rank, before caches, graphs and warm-up."""
    if getattr(runner, "is_draft_worker", False):
        return
    told = json.loads(Path(os.environ[VARIABLE]).read_text())
    if told["layer_ids"] is None:
        watch(runner.model, told)
    else:
        install(runner.model)


def fallback(_config: dict) -> Callable:
    """The hook factory of `--forward-hooks`, for versions without plugins: installs the same by another way."""
    # A factory is not given the model; SGLang's function that calls it has it.
    install(sys._getframe(1).f_locals["model"])
    return lambda _module, _args, _output: None


def install(model: nn.Module) -> None:
    """Switches capture on and hooks the logits processor of the ranks that write.

    Raises:
        RuntimeError: the model captures nothing, or other layers than those wanted.
    """
    told = json.loads(Path(os.environ[VARIABLE]).read_text())
    inner = language_model(model)
    # On every rank: with data-parallel attention a capture gathers, and a rank that does not take part hangs all.
    setter = getattr(model, "set_eagle3_layers_to_capture", None) or getattr(
        inner, "set_eagle3_layers_to_capture", None
    )
    if setter is None:
        raise RuntimeError(f"{type(model).__name__} cannot capture hidden states: it has no EAGLE-3 support in SGLang")
    setter(told["layer_ids"])
    layers = list(inner.model.layers_to_capture)
    if layers != told["layers"]:
        raise RuntimeError(f"told {told['layer_ids']}, this SGLang captures layers {layers} and not {told['layers']}")
    rank, world = _rank()
    # Behind attention every rank of a group holds the same rows; each group of data-parallel attention has its own.
    writes = rank % (world // told["groups"]) == 0
    writer = Writer(Path(told["folder"]), budget_bytes=told["budget_bytes"]) if writes else None
    if writer is not None:
        capture = Capture(writer, prefix=told["prefix"], num_layers=len(layers))
        inner.logits_processor.register_forward_pre_hook(capture, with_kwargs=True)
    _say_ready(model, told, layers, writes=writes)


def watch(model: nn.Module, told: dict[str, Any]) -> None:
    """Changes nothing: as soon as SGLang tells the model what a drafter reads, its layers must be those it learned on.

    SGLang does so after it has loaded the model, before it captures graphs. Without a drafter it never does, and there
    is no file READY.

    Raises:
        RuntimeError: from SGLang's own call, which ends the server: the model captures other layers.
    """
    inner, setter = language_model(model), getattr(model, "set_eagle3_layers_to_capture", None)
    if setter is None:
        raise RuntimeError(f"{type(model).__name__} cannot serve a drafter: it has no EAGLE-3 support in SGLang")

    def watched(*args: Any, **kwargs: Any) -> None:
        setter(*args, **kwargs)
        layers = list(inner.model.layers_to_capture)
        if layers != told["layers"]:
            raise RuntimeError(
                f"the drafter was trained on layers {told['layers']}, and this SGLang gives it {layers}: write it anew "
                "for this version with python -m eagle3.export"
            )
        _say_ready(model, told, layers, writes=False)

    model.set_eagle3_layers_to_capture = watched  # type: ignore[assignment]


def _say_ready(model: nn.Module, told: dict[str, Any], layers: list[int], *, writes: bool) -> None:
    rank, world = _rank()
    ready = {"pid": os.getpid(), "rank": rank, "world": world, "writes": writes, "layers": layers,
             "dtype": str(next(model.parameters()).dtype).removeprefix("torch.")}  # fmt: skip
    file = Path(told["folder"]) / f"READY.{os.getpid()}.json"
    file.with_suffix(".tmp").write_text(json.dumps(ready))
    file.with_suffix(".tmp").replace(file)


def language_model(model: nn.Module) -> Any:
    """The part that owns the logits processor: the model itself, or the language model inside it."""
    if hasattr(model, "logits_processor"):
        return model
    for name in INNER:
        inner = getattr(model, name, None)
        if hasattr(inner, "logits_processor"):
            return inner
    raise RuntimeError(f"{type(model).__name__} has no logits_processor, nor a language model with one")


def _rank() -> tuple[int, int]:
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()
