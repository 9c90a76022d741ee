"""Would an engine compute the drafter that was trained? Says so before anyone serves.

Engines guess, skip and substitute, most of it without a word, and the text that comes out is right all the same, only
no faster. Here their loaders are replayed on config.json and the header of model.safetensors.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from eagle3.export.engines import engine_of
from eagle3.export.facts import VerifierSizes, read_contents
from eagle3.export.rules import faults, unreadable
from eagle3.export.speculators import as_vllm_reads, is_speculators


@dataclass(frozen=True)
class Fault:
    """One thing that an engine would read otherwise than it was meant."""

    what: str
    """Key or tensor, what it is and what it must be."""
    effect: str
    """Which engine would do what."""

    def __str__(self) -> str:
        return f"{self.what}; {self.effect}"


def check(
    directory: Path, engine: str, version: str | None = None, verifier: VerifierSizes | None = None
) -> list[Fault]:
    """What that engine would misread in a drafter directory; empty if it serves the drafter that was trained.

    Args:
        engine: "sglang" or "vllm".
        version: None for the one that a drafter is written for.
        verifier: if given, the directory is held against it too.

    Raises:
        ValueError: an engine or version that is not known; a file that is absent or unreadable.
    """
    target = engine_of(engine, version)
    contents = read_contents(Path(directory), verifier)
    said = contents.config
    if is_speculators(said):
        if target.kind == "sglang":
            effect = "not know the network; write it anew with python -m eagle3.export"
            return [Fault("config.json is in speculators' format", f"{target.name} would {effect}")]
        contents = replace(contents, config=as_vllm_reads(said))
    found = list(faults(contents, target))
    if "norm_before_residual" not in said and is_speculators(said):
        found.append(("norm_before_residual is absent", "take it for true, where speculators takes it for false"))
    found = found or list(unreadable(contents))  # else it is one of the faults in other words
    return [Fault(what, f"{target.name} would {effect}") for what, effect in found]
