"""The reference engine: the verifier in this process, by transformers, on CPU or one GPU."""

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import transformers
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from transformers import GenerationConfig

from extract.engines.base import Captured, EngineError, Generated
from extract.layers import check_capture_layers
from extract.verifier import VerifierSpec, decoder_layers, final_norm, load_model, text_backbone


class InProcessEngine:
    """Captures and generates with one loaded model; its memory depends on the batch alone."""

    name = "inprocess"
    version = transformers.__version__

    def __init__(
        self,
        spec: VerifierSpec,
        *,
        capture_layers: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        self.spec = spec
        self.capture_layers = check_capture_layers(capture_layers, spec.num_layers)
        self.dtype = dtype
        self.device = torch.device(device)
        self.model: Any = load_model(spec, dtype=dtype, device=self.device)
        self.backbone = text_backbone(self.model)
        # generate() takes from here what is left open: a verifier's own sampling, penalties, forced tokens.
        self.model.generation_config = GenerationConfig()
        # It asks for the last token's logits through a strided view, for which torch on a CPU copies the head once a
        # sequence: 1.8 GB for 32 prompts of a 135 M model.
        self.model.get_output_embeddings().register_forward_pre_hook(lambda _, args: (args[0].contiguous(),))

    @torch.no_grad()
    def capture(self, batch: Sequence[Sequence[int]]) -> list[Captured]:
        """One forward pass over the batch, padded on the right; see `Engine.capture`.

        Raises ValueError for ids or lengths that the verifier cannot take, EngineError naming the sequences
        whose states are not finite.
        """
        if not batch:
            return []
        self._check_prompts(batch)
        ids, mask = self._padded(batch, left=False)
        with _out_of_memory_is_engine_error(len(batch)), self._recording(mask) as rows:
            self.backbone(input_ids=ids, attention_mask=mask.long(), use_cache=False)
            aux = torch.cat([rows[layer] for layer in self.capture_layers], dim=1).to("cpu", self.dtype)
            last = rows["last"].to("cpu", self.dtype)
        lengths = [len(sequence) for sequence in batch]
        self._check_states(aux, last, lengths)
        return [Captured(a, b) for a, b in zip(aux.split(lengths), last.split(lengths), strict=True)]

    @torch.no_grad()
    def generate(
        self,
        batch: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        stop_ids: Collection[int],
    ) -> list[Generated]:
        """Answers by transformers' generate(), padded on the left; see `Engine.generate`.

        Sampling depends on seed and batch alone, and leaves torch's own random state as it was.
        """
        if not batch:
            return []
        if max_new_tokens < 1 or temperature < 0 or not 0 < top_p <= 1:
            raise ValueError(
                f"max_new_tokens={max_new_tokens} must be >= 1, temperature={temperature} >= 0, top_p={top_p} in (0, 1]"
            )
        self._check_prompts(batch)
        ids, mask = self._padded(batch, left=True)
        # generate() would fill these in from its defaults (top_k 50) where they are not said
        sampling = {"temperature": temperature, "top_p": top_p, "top_k": 0} if temperature > 0 else {}
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=temperature > 0,
            num_beams=1,
            eos_token_id=sorted(stop_ids) or None,
            pad_token_id=0,
            **sampling,
        )
        devices = [self.device] if self.device.type == "cuda" else []
        with _out_of_memory_is_engine_error(len(batch)), torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            output = self.model.generate(ids, attention_mask=mask.long(), generation_config=config)
        return [_cut(answer, stop_ids) for answer in output[:, ids.shape[1] :].tolist()]

    def close(self) -> None:
        """Frees the model's memory."""
        del self.model, self.backbone
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _padded(
        self, batch: Sequence[Sequence[int]], *, left: bool
    ) -> tuple[Int64[Tensor, "B T"], Bool[Tensor, "B T"]]:
        """Ids and which of them are real; the padding id means nothing, because the mask is always given."""
        width = max(len(sequence) for sequence in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros(len(batch), width, dtype=torch.bool)
        for row, sequence in enumerate(batch):
            place = slice(width - len(sequence), width) if left else slice(0, len(sequence))
            ids[row, place] = torch.tensor(sequence, dtype=torch.int64)
            mask[row, place] = True
        return ids.to(self.device), mask.to(self.device)

    @contextmanager
    def _recording(self, mask: Bool[Tensor, "B T"]) -> Iterator[dict]:
        """While inside, a forward pass leaves the real rows of the captured inputs and of the final norm."""
        rows: dict[int | str, Float[Tensor, "N H"]] = {}
        layers = decoder_layers(self.model)

        def record_input(layer: int) -> Callable[[nn.Module, tuple, dict], None]:
            def hook(_: nn.Module, args: tuple, kwargs: dict) -> None:
                rows[layer] = (args[0] if args else kwargs["hidden_states"])[mask]

            return hook

        def record_last(_module: nn.Module, _args: tuple, output: Tensor) -> None:
            rows["last"] = output[mask]

        with ExitStack() as stack:
            for layer in self.capture_layers:
                handle = layers[layer].register_forward_pre_hook(record_input(layer), with_kwargs=True)
                stack.callback(handle.remove)
            stack.callback(final_norm(self.model).register_forward_hook(record_last).remove)
            yield rows

    def _check_prompts(self, batch: Sequence[Sequence[int]]) -> None:
        for index, sequence in enumerate(batch):
            if not sequence or min(sequence) < 0 or max(sequence) >= self.spec.vocab_size:
                raise ValueError(
                    f"sequence {index} of the batch is empty or holds ids outside 0 .. "
                    f"{self.spec.vocab_size - 1}, the vocabulary of {self.spec.path}: {list(sequence)[:8]}..."
                )
            if len(sequence) > self.spec.max_position_embeddings:
                raise ValueError(
                    f"sequence {index} of the batch: {len(sequence)} tokens exceed the verifier's "
                    f"max_position_embeddings {self.spec.max_position_embeddings}; lower extraction.max_len"
                )

    def _check_states(self, aux: Tensor, last: Tensor, lengths: list[int]) -> None:
        wanted = (sum(lengths), len(self.capture_layers) * self.spec.hidden_size)
        assert tuple(aux.shape) == wanted and last.shape == (wanted[0], self.spec.hidden_size), aux.shape
        finite = torch.isfinite(aux).all(dim=1) & torch.isfinite(last).all(dim=1)
        if not finite.all():
            bad = [index for index, rows in enumerate(finite.split(lengths)) if not rows.all()]
            raise EngineError(
                f"hidden states of sequences {bad} of the batch hold NaN or inf in {self.dtype}; "
                "bfloat16 or float32 hold what float16 cannot"
            )


def _cut(answer: list[int], stop_ids: Collection[int]) -> Generated:
    """The answer up to its end-of-turn token; generate() pads those of a batch that ended early."""
    end = next((place for place, token in enumerate(answer) if token in stop_ids), None)
    return Generated(answer, "length") if end is None else Generated(answer[: end + 1], "stop")


@contextmanager
def _out_of_memory_is_engine_error(batch_size: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EngineError(f"the device has too little memory for a batch of {batch_size}: {error}") from error
