"""The drafter directory: config.json and model.safetensors, in the form that SGLang and vLLM load.

Both engines skip or guess what they do not find, some of it silently. So everything is written out, in both engines'
spelling, and loading here is strict: what is missing, unknown, of another shape or contradicts itself is an error.
"""

import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3.drafter import DrafterShape, Eagle3Drafter
from eagle3.drafter_config import Origin, config_of, read_config, shape_of
from eagle3.vocab import DraftVocab
from extract.durable import sync

CONFIG, WEIGHTS = "config.json", "model.safetensors"
DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
DTYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def save_drafter(
    drafter: Eagle3Drafter, directory: Path, *, origin: Origin, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Writes the drafter directory and returns it. The verifier's embedding is no part of it: engines share it.

    An existing drafter directory is replaced whole. If the machine dies between the two renames, the old one is
    left under `backup_of(directory)`, where loading finds it.

    Raises:
        ValueError: `directory` holds something else than a drafter, or a weight is not finite.
    """
    directory = Path(directory)
    if dtype not in DTYPES:
        raise ValueError(f"a drafter cannot be written in {dtype}; choose one of {list(DTYPES)}")
    tensors = {name: _to_disk(name, tensor, dtype) for name, tensor in drafter.state_dict().items()}
    directory.parent.mkdir(parents=True, exist_ok=True)
    _refuse_foreign(directory)
    fresh = Path(tempfile.mkdtemp(prefix=f".{directory.name}.tmp-", dir=directory.parent))
    try:
        fresh.chmod(0o755)
        config = config_of(drafter.shape, origin, str(dtype).removeprefix("torch."))
        (fresh / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, fresh / WEIGHTS, metadata={"format": "pt"})
        for name in (CONFIG, WEIGHTS):
            sync(fresh / name)
        sync(fresh)
        _replace(fresh, directory)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return directory


def load_drafter(directory: Path, embedding: Float[Tensor, "V H"]) -> Eagle3Drafter:
    """The drafter of a directory, in float32, with the verifier's embedding.

    Raises:
        ValueError: naming the file and every tensor that is missing, unknown, of another shape or dtype, and draft
            vocabulary maps that do not belong together.
    """
    shape, tensors = _read(directory)
    drafter = Eagle3Drafter(shape, _vocab(directory, tensors), embedding)
    drafter.load_state_dict({name: t.float() if t.is_floating_point() else t for name, t in tensors.items()})
    return drafter


def read_vocab(directory: Path) -> DraftVocab:
    """The drafter's vocabulary, after the same checks as in `load_drafter`."""
    return _vocab(directory, _read(directory)[1])


def read_shape(directory: Path) -> DrafterShape:
    """What the drafter's config.json says of its network; ValueError names the file and key that cannot be used."""
    file = find_drafter(directory) / CONFIG
    return shape_of(read_config(file), file)


def read_origin(directory: Path) -> Origin | None:
    """What the drafter was made for; None for a drafter that another program wrote."""
    file = find_drafter(directory) / CONFIG
    config = read_config(file)
    if "origin" not in config:
        return None
    try:
        values = {**config["origin"], "chat_template_sha256": config["chat_template_sha256"]}
        return Origin(**{**values, "end_of_turn_ids": tuple(values["end_of_turn_ids"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file}: origin is not what this program writes ({error})") from None


def find_drafter(directory: Path) -> Path:
    """`directory`, or its backup if a save was killed between its two renames; ValueError if neither is there."""
    directory = Path(directory)
    for place in (directory, backup_of(directory)):
        if (place / CONFIG).is_file() and (place / WEIGHTS).is_file():
            return place
    there = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else "no such directory"
    raise ValueError(
        f"{directory.absolute()} is no drafter directory: it needs {CONFIG} and {WEIGHTS} ({there}); "
        "train one with train.py"
    )


def backup_of(directory: Path) -> Path:
    """Where the old drafter lies for the moment in which the new one takes its name."""
    return directory.with_name(f".{directory.name}.previous")


def _to_disk(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.detach().cpu()
    if not tensor.is_floating_point():
        return tensor.contiguous()
    tensor = tensor.to(dtype).contiguous()
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"the drafter's {name} is not finite in {dtype}; it was not written")
    return tensor


def _read(directory: Path) -> tuple[DrafterShape, dict[str, Tensor]]:
    directory = find_drafter(directory)
    config = read_config(directory / CONFIG)
    shape = shape_of(config, directory / CONFIG)
    return shape, _read_weights(directory / WEIGHTS, shape, DTYPE_NAMES[config["torch_dtype"]])


def _vocab(directory: Path, tensors: dict[str, Tensor]) -> DraftVocab:
    try:
        return DraftVocab.from_tensors(tensors["d2t"], tensors["t2d"])
    except ValueError as error:
        raise ValueError(f"{find_drafter(directory) / WEIGHTS}: {error}") from None


def _read_weights(file: Path, shape: DrafterShape, dtype: str) -> dict[str, Tensor]:
    """All tensors as stored, after names, shapes and dtypes were found to be exactly the network's."""
    try:
        with safe_open(file, framework="pt") as stored:
            names = list(stored.keys())
            found = {
                name: (tuple(stored.get_slice(name).get_shape()), stored.get_slice(name).get_dtype()) for name in names
            }
            faults = list(_faults(found, _expected(shape, dtype)))
            if faults:
                raise ValueError(f"{file}: no drafter of this config.json: {'; '.join(faults)}")
            return {name: stored.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error}); export the drafter again") from None


def _expected(shape: DrafterShape, dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
    vocab = DraftVocab(torch.arange(shape.draft_vocab_size), shape.vocab_size, None)
    _ = vocab.d2t, vocab.t2d  # computed before the meta device is on, where there are no values
    with torch.device("meta"):
        model = Eagle3Drafter(shape, vocab, torch.empty(shape.vocab_size, shape.hidden_size))
    codes = {torch.int64: "I64", torch.bool: "BOOL", torch.float32: dtype}
    return {name: (tuple(t.shape), codes[t.dtype]) for name, t in model.state_dict().items()}


def _faults(found: dict[str, tuple], expected: dict[str, tuple]) -> Iterable[str]:
    for name in sorted(expected.keys() - found.keys()):
        yield f"{name} {list(expected[name][0])} is missing"
    for name in sorted(found.keys() - expected.keys()):
        yield f"{name} {list(found[name][0])} is unknown"
    for name in sorted(expected.keys() & found.keys()):
        if found[name] != expected[name]:
            (shape, dtype), (want, want_dtype) = found[name], expected[name]
            yield f"{name} is {dtype} {list(shape)}, must be {want_dtype} {list(want)}"


def _refuse_foreign(directory: Path) -> None:
    """Replacing removes what was there, so nothing but a drafter may be there."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ValueError(f"drafter directory {directory.absolute()} is a file")
    foreign = sorted(path.name for path in directory.iterdir() if path.name not in (CONFIG, WEIGHTS))
    if foreign:
        raise ValueError(
            f"drafter directory {directory.absolute()} holds {foreign[:5]}, which saving would remove; name another one"
        )


def _replace(fresh: Path, directory: Path) -> None:
    backup = backup_of(directory)
    if directory.exists():
        shutil.rmtree(backup, ignore_errors=True)
        directory.rename(backup)
    fresh.rename(directory)
    sync(directory.parent)
    shutil.rmtree(backup, ignore_errors=True)
