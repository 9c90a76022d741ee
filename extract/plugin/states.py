"""The hook: picks the rows of our requests out of a prefill and hands them over without waiting for the GPU.

SGLang's logits processor is called once a forward pass with the captured states, the final state after the norm, and
the batch: whose rows these are, how many each, and where each chunk starts in its prompt.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .writer import Part, Rows, Writer

NAMES = ("input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states")
"""Positional arguments of SGLang's LogitsProcessor.forward."""


@dataclass(frozen=True)
class Seen:
    """A prefill: ids [T], final states [T, H], captured states [T, H] each or one [T, A*H], and the batch."""

    input_ids: Tensor
    last: Tensor
    aux: Any
    batch: Any


class Capture:
    """A forward pre-hook of the logits processor. `num_layers` states are captured of each token."""

    def __init__(self, writer: Writer, *, prefix: str, num_layers: int) -> None:
        self.writer, self.prefix, self.num_layers = writer, prefix, num_layers
        self._stream: Any = None

    def __call__(self, _module: nn.Module, args: tuple, kwargs: dict) -> None:
        told = {**dict(zip(NAMES, args, strict=False)), **kwargs}
        seen = Seen(told["input_ids"], told["hidden_states"], told.get("aux_hidden_states"), told["logits_metadata"])
        parts = self._parts(seen.batch)
        if not parts:
            return
        if (fault := self._fault(seen, parts)) is not None:
            self.writer.fail(fault)
            return
        aux = [seen.aux] if torch.is_tensor(seen.aux) else list(seen.aux)
        total = parts[-1].stop
        # The copies are made now: SGLang overwrites ids and, with some kernels, states in the next forward pass.
        states = torch.cat([rows[:total] for rows in (*aux, seen.last)], dim=-1)
        ids = seen.input_ids[:total].to(torch.int32, copy=True)
        self.writer.put(self._on_the_host(states, ids, parts))

    def _parts(self, batch: Any) -> list[Part]:
        """Our requests' places in a prefill; none in decoding, warm-up and dummy passes."""
        rids, lengths = getattr(batch, "rids", None), getattr(batch, "extend_seq_lens_cpu", None)
        if not rids or not lengths or not batch.forward_mode.is_extend():
            return []
        parts, begin = [], 0
        for rid, length, start in zip(rids, lengths, batch.extend_prefix_lens_cpu, strict=False):
            if rid.startswith(self.prefix) and length:
                parts.append(Part(rid, int(start), begin, begin + int(length)))
            begin += int(length)
        return parts

    def _fault(self, seen: Seen, parts: list[Part]) -> str | None:
        if seen.aux is None:
            return "the model hands no captured states to its logits processor"
        aux = [seen.aux] if torch.is_tensor(seen.aux) else list(seen.aux)
        width = sum(rows.shape[-1] for rows in aux)
        if width != self.num_layers * seen.last.shape[-1]:
            return f"{width} numbers a token were captured, not {self.num_layers} x {seen.last.shape[-1]}"
        shortest = min(len(rows) for rows in (*aux, seen.last, seen.input_ids))
        if shortest < parts[-1].stop:
            return f"{shortest} rows of states for {parts[-1].stop} tokens"
        return None

    def _on_the_host(self, states: Tensor, ids: Tensor, parts: list[Part]) -> Rows:
        if not states.is_cuda:
            return Rows(states, ids, parts, None)
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in (states, ids)]
            for here, there in zip(host, (states, ids), strict=True):
                here.copy_(there, non_blocking=True)
                there.record_stream(self._stream)  # or its memory would be given away before it is copied
            event = self._stream.record_event()
        return Rows(host[0], host[1], parts, event)
