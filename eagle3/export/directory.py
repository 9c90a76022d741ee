"""The drafter directory: config.json and model.safetensors, in the form that SGLang and vLLM load.

Both engines skip or guess what they do not find, some of it silently. So everything is written out, in both engines'
spelling, and loading here is strict: what is missing, unknown, of another shape or contradicts itself is an error.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3.drafter import DrafterShape, Eagle3Drafter
from eagle3.export.check import check
from eagle3.export.config import (
    CONFIG,
    WEIGHTS,
    Origin,
    Serving,
    config_of,
    origin_of_config,
    read_config,
    serving_of,
    shape_of,
)
from eagle3.export.facts import MAPS
from eagle3.export.files import read_json
from eagle3.export.network import NETWORK, contradictions, network_json, read_network, sort_metadata
from eagle3.vocab import DraftVocab
from extract.durable import sync
from extract.numbering import DEFAULT_SGLANG

DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
DTYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def save_drafter(
    drafter: Eagle3Drafter,
    directory: Path,
    *,
    origin: Origin,
    dtype: torch.dtype = torch.bfloat16,
    state: Mapping[str, Tensor] | None = None,
) -> Path:
    """Writes the drafter directory and returns it. The verifier's embedding is no part of it: engines share it.

    `state` is the drafter's whole state dict, where this process holds only a part of each weight.
    An existing drafter directory is replaced whole. If the machine dies between the two renames, the old one is
    left under `backup_of(directory)`, where loading finds it.
    Where SGLang cannot be told the captured layers (`build.warn_of_serving` says so as training starts), config.json
    says no SGLang version and vLLM alone serves it.

    Raises:
        ValueError: `directory` holds something else than a drafter, a weight is not finite, or an engine would not
            serve what was trained.
    """
    shape, serving = drafter.shape, None
    with suppress(ValueError):
        serving = serving_of(shape, origin.verifier_family, DEFAULT_SGLANG)
    tensors = drafter.state_dict() if state is None else state
    return write_drafter(
        directory, shape, tensors, family=origin.verifier_family, serving=serving, origin=origin, dtype=dtype
    )


def write_drafter(
    directory: Path,
    shape: DrafterShape,
    tensors: Mapping[str, Tensor],
    *,
    family: str,
    serving: Serving | None,
    origin: Origin | None,
    dtype: torch.dtype,
    look: Callable[[Path], None] = lambda fresh: None,
) -> Path:
    """`save_drafter` for tensors by our names; `family`, `serving` and `origin` as in `config_of`.

    `look` sees the written files before they take the directory's name, and raises to refuse them.
    """
    if dtype not in DTYPES:
        raise ValueError(f"a drafter cannot be written in {dtype}; choose one of {list(DTYPES)}")
    unmapped = shape.draft_vocab_size == shape.vocab_size  # vLLM refuses maps then
    stored = {n: _to_disk(n, t, dtype) for n, t in tensors.items() if not (unmapped and n in MAPS)}
    name = str(dtype).removeprefix("torch.")
    config = config_of(shape, name, family=family, serving=serving, origin=origin)

    def refuse(fresh: Path) -> None:
        versions = () if serving is None else serving.versions
        faults = [*check(fresh, "vllm"), *(fault for v in versions for fault in check(fresh, "sglang", v))]
        if faults:
            raise ValueError(f"{directory} was not written: {'; '.join(map(str, dict.fromkeys(faults)))}")
        look(fresh)

    return replace_directory(directory, config, stored, {NETWORK: network_json(shape)}, refuse)


def replace_directory(
    directory: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    metadata: dict[str, str],
    refuse: Callable[[Path], None],
) -> Path:
    """Writes both files beside `directory`, has `refuse` look at them, and lets them take its name at once.

    Of a link it is the directory behind it that is replaced; the link stays.
    """
    directory = Path(directory).resolve()
    directory.parent.mkdir(parents=True, exist_ok=True)
    _refuse_foreign(directory)
    fresh = Path(tempfile.mkdtemp(prefix=f".{directory.name}.tmp-", dir=directory.parent))
    try:
        fresh.chmod(0o755)
        (fresh / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, fresh / WEIGHTS, metadata={"format": "pt", **metadata})
        sort_metadata(fresh / WEIGHTS)
        refuse(fresh)
        for name in (CONFIG, WEIGHTS):
            (fresh / name).chmod(0o644)  # servers run as other users; safetensors makes 0600
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
    vocab = _vocab(directory, shape, tensors)
    drafter = Eagle3Drafter(shape, vocab, embedding)
    weights = {name: t.float() for name, t in tensors.items() if name not in MAPS}
    drafter.load_state_dict({**weights, "d2t": vocab.d2t, "t2d": vocab.t2d})
    return drafter


def read_tensors(directory: Path) -> tuple[DrafterShape, dict[str, Tensor]]:
    """The network and its tensors as stored, after the same checks as in `load_drafter`."""
    shape, tensors = _read(directory)
    _vocab(directory, shape, tensors)
    return shape, tensors


def read_vocab(directory: Path) -> DraftVocab:
    """The drafter's vocabulary, after the same checks as in `load_drafter`."""
    return _vocab(directory, *_read(directory))


def read_shape(directory: Path) -> DrafterShape:
    """What the drafter's config.json says of its network; ValueError names the file and key that cannot be used."""
    file = find_drafter(directory) / CONFIG
    return shape_of(read_config(file), file)


def read_origin(directory: Path) -> Origin | None:
    """What the drafter was made for; None for a drafter that another program wrote."""
    file = find_drafter(directory) / CONFIG
    return origin_of_config(read_config(file), file)


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


def _vocab(directory: Path, shape: DrafterShape, tensors: dict[str, Tensor]) -> DraftVocab:
    if not tensors.keys() & set(MAPS):
        assert shape.draft_vocab_size == shape.vocab_size, "the maps may be absent in no other case"
        return DraftVocab.whole(shape.vocab_size)
    try:
        return DraftVocab.from_tensors(tensors["d2t"], tensors["t2d"])
    except ValueError as error:
        raise ValueError(f"{find_drafter(directory) / WEIGHTS}: {error}") from None


def _read_weights(file: Path, shape: DrafterShape, dtype: str) -> dict[str, Tensor]:
    """All tensors as stored, after names, shapes and dtypes were found to be exactly the network's."""
    try:
        with safe_open(file, framework="pt") as stored:
            names = list(stored.keys())
            _refuse_contradictions(file, shape, read_network(stored.metadata(), file))
            found = {
                name: (tuple(stored.get_slice(name).get_shape()), stored.get_slice(name).get_dtype()) for name in names
            }
            faults = misfits(found, shape, dtype)
            if faults:
                raise ValueError(f"{file}: no drafter of this config.json: {'; '.join(faults)}")
            return {name: stored.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error}); export the drafter again") from None


def _refuse_contradictions(file: Path, said: DrafterShape, trained: DrafterShape | None) -> None:
    if trained is None:
        return
    wrong = [f"{key} is {ours}, the weights were trained with {theirs}"
             for key, ours, theirs in contradictions(said, trained)]  # fmt: skip
    if wrong:
        raise ValueError(f"{file.with_name(CONFIG)} was changed: {'; '.join(wrong)}; export the drafter again")


def misfits(found: Mapping[str, tuple[tuple[int, ...], str]], shape: DrafterShape, dtype: str) -> list[str]:
    """Tensors (shape and safetensors' dtype by name) that are not exactly those of a network with weights in `dtype`.

    The maps may be absent where every token can be drafted.
    """
    expected = _expected(shape, dtype)
    if shape.draft_vocab_size == shape.vocab_size and not found.keys() & set(MAPS):
        expected = {name: held for name, held in expected.items() if name not in MAPS}
    return list(_differences(found, expected))


def _expected(shape: DrafterShape, dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
    vocab = DraftVocab(torch.arange(shape.draft_vocab_size), shape.vocab_size, None)
    _ = vocab.d2t, vocab.t2d  # computed before the meta device is on, where there are no values
    with torch.device("meta"):
        model = Eagle3Drafter(shape, vocab, torch.empty(shape.vocab_size, shape.hidden_size))
    codes = {torch.int64: "I64", torch.bool: "BOOL", torch.float32: dtype}
    return {name: (tuple(t.shape), codes[t.dtype]) for name, t in model.state_dict().items()}


def _differences(found: Mapping[str, tuple], expected: Mapping[str, tuple]) -> Iterable[str]:
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
    if (directory / CONFIG).exists() and "draft_vocab_size" not in read_json(directory / CONFIG):
        raise ValueError(f"{directory.absolute()} holds a model that is no drafter; name another directory")


def _replace(fresh: Path, directory: Path) -> None:
    backup = backup_of(directory)
    if directory.exists():
        shutil.rmtree(backup, ignore_errors=True)
        directory.rename(backup)
    fresh.rename(directory)
    sync(directory.parent)
    shutil.rmtree(backup, ignore_errors=True)
