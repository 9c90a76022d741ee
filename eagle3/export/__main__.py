"""Writes a drafter for another engine or version, and checks what an engine would make of one.

python -m eagle3.export RUN_OR_DIR                        for SGLang and vLLM, beside where it lies
python -m eagle3.export check DIR --engine sglang         would that engine serve what was trained? exit 1 if not
python -m eagle3.export to-speculators DIR --out DIR2 --verifier DIR3
"""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import get_console
from rich.text import Text

from eagle3.drafter import DrafterShape
from eagle3.export.check import Fault, check
from eagle3.export.config import CONFIG, LAYER_IDS, Origin, serving_of
from eagle3.export.convert import Source, read_source
from eagle3.export.directory import find_drafter, read_origin, read_tensors, replace_directory, write_drafter
from eagle3.export.engines import ENGINES, VLLM_VERSIONS, engine_of
from eagle3.export.facts import EMBEDDING, read_contents
from eagle3.export.files import read_json
from eagle3.export.parity import refuse_other_outputs
from eagle3.export.speculators import speculators_config
from eagle3.export.verifier import VerifierDir, read_verifier
from extract.numbering import DEFAULT_SGLANG, NEWEST, OLDEST
from extract.progress import closing_table, shown_path

BEST = "drafter"
"""The best drafter of a training, within its run directory."""
OURS = "this program's drafter"


def export(options: argparse.Namespace) -> int:
    """Writes a drafter directory for one SGLang version and for vLLM; ValueError where that cannot be."""
    place = drafter_of_run(options.source)
    verifier = None if options.verifier is None else read_verifier(options.verifier)
    out = options.out or place.absolute().parent / f"{place.absolute().name}-sglang-{options.sglang}"
    _refuse_within(out, place)
    source, family, origin = _read(place, options.capture_layers, verifier)
    serving = serving_of(source.shape, family, options.sglang)

    def look(fresh: Path) -> None:
        for engine, version in (("sglang", options.sglang), ("vllm", None)):
            _refuse(check(fresh, engine, version, verifier))
        refuse_other_outputs(source, fresh)

    write_drafter(
        out, source.shape, source.own_tensors(),
        family=family, serving=serving, origin=origin, dtype=source.dtype, look=look,
    )  # fmt: skip
    name = shown_path(out)
    closing_table(
        f"Drafter in {name}",
        [
            ("from", f"{shown_path(place)}, {source.form}; the written one gives the same logits, bit by bit"),
            *_network_rows(source.shape),
            ("SGLang is told", f"{list(serving.ids)} for {family}: right in {', '.join(serving.versions)}"),
            ("vLLM is told", str(list(source.shape.capture_layers))),
            ("checked for", f"SGLang {options.sglang}, vLLM {VLLM_VERSIONS[-1]}"),
            ("in SGLang", f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {name}"),
            ("in vLLM", f'--speculative-config \'{{"method": "eagle3", "model": "{name}", …}}\''),
        ],
        f"python evaluate.py drafter_dir={name}",
    )
    return 0


def judge(options: argparse.Namespace) -> int:
    """Prints every fault, or a table of what was checked; 1 if there is a fault."""
    place = drafter_of_run(options.source)
    verifier = None if options.verifier is None else read_verifier(options.verifier)
    name = engine_of(options.engine, options.version).name
    directory = find_drafter(place)
    faults = check(directory, options.engine, options.version, verifier)
    if faults:
        get_console().print(Text(f"{place}: {name} would not serve this drafter as it was trained"), soft_wrap=True)
        for fault in faults:
            get_console().print(Text(f"  {fault}", style="red"), soft_wrap=True)
        return 1
    contents = read_contents(directory, verifier)
    trained = "config.json agrees with what the weights say of themselves"
    if contents.trained is None:
        trained = "the weights say nothing of themselves: config.json is taken at its word"
    beside = "not compared: name it with --verifier" if verifier is None else f"fits {verifier.directory}"
    if options.engine == "sglang" and contents.family is None:
        beside += "; its family is not known, SGLang's layer ids were taken for one less than the layers"
    closing_table(
        f"{name} would serve {shown_path(place)} as it was trained",
        [
            ("precision", _precision(contents.config, options.engine)),
            ("tensors", f"{len(contents.tensors)}, with the names, shapes and dtypes that it looks for"),
            ("layers", f"{contents.config.get(LAYER_IDS)} at the top, {contents.nested.get(LAYER_IDS)} for SGLang"),
            ("network", trained),
            ("verifier", beside),
        ],
        None,
    )
    return 0


def to_speculators(options: argparse.Namespace) -> int:
    """Writes a drafter of ours in speculators' format; ValueError where it is none or vLLM would misread it."""
    place = drafter_of_run(options.source)
    verifier, origin = read_verifier(options.verifier), read_origin(place)
    _refuse_within(options.out, place)
    _refuse_stranger(verifier, origin)
    shape, tensors = read_tensors(place)
    drafts = options.drafts if options.drafts is not None else (origin.ttt_steps if origin else None)
    if drafts is None:
        raise ValueError(f"{place} does not say how many steps it was trained on; give --drafts")
    if drafts < 1:
        raise ValueError(f"--drafts {drafts} drafts nothing; give 1 or more")
    source = Source(OURS, shape, tensors)
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    # The format's own loader leaves an absent embedding as memory was.
    named[EMBEDDING] = verifier.embedding().to(source.dtype)
    config = speculators_config(shape, str(source.dtype).removeprefix("torch."), verifier, drafts)

    def refuse(fresh: Path) -> None:
        _refuse(check(fresh, "vllm", None, verifier))
        again = read_source(fresh, capture_layers=None, verifier=verifier)
        assert again.shape == shape, "what is written is read back as the same network"

    replace_directory(options.out, config, named, {}, refuse)
    closing_table(
        f"Drafter in speculators' format in {shown_path(options.out)}",
        [
            ("from", shown_path(place)),
            *_network_rows(shape),
            ("embedding", "the verifier's is in the file, as this format has it"),
            ("drafts", f"{drafts} tokens at a time beside {verifier.directory}"),
        ],
        f"vllm serve {shown_path(options.out)}",
    )
    return 0


def drafter_of_run(path: Path) -> Path:
    """`path`, or the best drafter of the training whose run directory it is."""
    best = Path(path) / BEST
    return best if (best / CONFIG).is_file() else Path(path)


def _precision(config: dict[str, Any], engine: str) -> str:
    dtype = str(config.get("torch_dtype", config.get("dtype")))
    lost = dtype == "float32" and engine == "sglang"
    return f"{dtype}; SGLang serves it in float16 unless it is given --dtype" if lost else dtype


def _read(
    place: Path, capture_layers: Sequence[int] | None, verifier: VerifierDir | None
) -> tuple[Source, str, Origin | None]:
    """The drafter, its verifier's family, and what it was made for if this program made it."""
    config = read_json(find_drafter(place) / CONFIG)
    if "sglang_versions" not in config:
        source = read_source(place, capture_layers=capture_layers, verifier=verifier)
        return source, _family_of(place, verifier), None
    if capture_layers:
        raise ValueError(f"{place} names its layers itself; leave out --capture-layers")
    origin = read_origin(place)
    family = config.get("verifier_family") or _family_of(place, verifier)
    return Source(OURS, *read_tensors(place)), family, origin


def _family_of(place: Path, verifier: VerifierDir | None) -> str:
    if verifier is None:
        raise ValueError(
            f"{place} does not say for which verifier it is; give the verifier's directory with --verifier (its "
            "config.json is enough): SGLang numbers layers by its model_type"
        )
    return verifier.model_type


def _refuse_within(out: Path, place: Path) -> None:
    """A drafter directory holds its two files and nothing else."""
    source = find_drafter(place).resolve()
    if source in out.resolve().parents:
        raise ValueError(f"--out {out} lies within the drafter {source} that is read; name a directory elsewhere")


def _refuse_stranger(verifier: VerifierDir, origin: Origin | None) -> None:
    """The file is to hold this verifier's embedding, and another's would draft something else."""
    if origin is not None and (sha256 := verifier.sha256()) != origin.verifier_sha256:
        raise ValueError(
            f"--verifier {verifier.directory} is not the verifier that the drafter was trained for: {sha256[:12]}, not "
            f"{origin.verifier_sha256[:12]} of {origin.verifier}; give that very directory"
        )


def _network_rows(shape: DrafterShape) -> list[tuple[str, str]]:
    flags = ", ".join(name for name in ("fc_norm", "norm_output") if getattr(shape, name))
    return [
        ("drafts", f"{shape.draft_vocab_size:,} of {shape.vocab_size:,} tokens"),
        ("reads layers", f"{list(shape.capture_layers)}{f', with {flags}' if flags else ''}"),
    ]


def _refuse(faults: Sequence[Fault]) -> None:
    if faults:
        raise ValueError(f"nothing written: {'; '.join(map(str, faults))}")


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m eagle3.export {command}".rstrip(),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, metavar="RUN_OR_DIR", help="a training's run directory, or a drafter's")
    parser.add_argument("--verifier", type=Path, metavar="DIR", required=command == "to-speculators",
                        help="the verifier's directory; config.json is enough where there is no embedding")  # fmt: skip
    if command == "check":
        parser.add_argument("--engine", choices=ENGINES, required=True)
        parser.add_argument("--version", help=f"SGLang {OLDEST} to {NEWEST} or vLLM {VLLM_VERSIONS[-1]}; "
                                              f"default SGLang {DEFAULT_SGLANG}")  # fmt: skip
        return parser
    parser.add_argument("--out", type=Path, metavar="DIR", required=command == "to-speculators",
                        help="where to; default NAME-sglang-VERSION beside the source")  # fmt: skip
    if command == "to-speculators":
        parser.add_argument("--drafts", type=int, metavar="K", help="tokens drafted at a time; default as trained")
        return parser
    parser.add_argument("--sglang", default=DEFAULT_SGLANG, metavar="VERSION",
                        help=f"{OLDEST} to {NEWEST}; default {DEFAULT_SGLANG}")  # fmt: skip
    parser.add_argument("--capture-layers", type=int, nargs="+", metavar="K",
                        help="k, where the drafter names none: it reads the inputs of these layers")  # fmt: skip
    return parser


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "": export,
    "check": judge,
    "to-speculators": to_speculators,
}


def main(arguments: Sequence[str]) -> int:
    command = arguments[0] if arguments and arguments[0] in COMMANDS else ""
    options = _parser(command).parse_args(arguments[1:] if command else arguments)
    try:
        return COMMANDS[command](options)
    except (ValueError, OSError) as error:
        logging.basicConfig(format="%(message)s")
        logging.getLogger(__name__).error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
