"""README figures from benchmarks/results/*.json.

`python -m benchmarks.figures` takes over what was measured here (outputs/benchmarks) and renders the README anew.
"""

import re
import shutil
import statistics
from pathlib import Path
from typing import Any

from benchmarks.record import FRESH, RESULTS, read_result
from eagle3.gate import Counts, total

README = Path(__file__).resolve().parent.parent / "README.md"


def quickstart() -> str:
    result = read_result("quickstart")
    rows = {row["stage"]: row for row in result["rows"]}
    extract, train, judged = rows["extract"], rows["train"], rows["evaluate"]
    lines = [
        f"| stage of `make demo` | seconds | peak GiB | result |\n|---|---|---|---|\n"
        f"| extract | {extract['seconds']:.0f} | {extract['peak_gib']:.1f} | {extract['tokens']:,} tokens captured, "
        f"{extract['supervised']:,} written by the verifier |\n"
        f"| train | {train['seconds']:.0f} | {train['peak_gib']:.1f} | accept_len {train['accept_len']:.3f} |\n"
        f"| evaluate | {judged['seconds']:.0f} | {judged['peak_gib']:.1f} | acceptance length "
        f"**{judged['accept_len']:.3f}** ({judged['accept_len_low']:.3f} to {judged['accept_len_high']:.3f}) |\n"
        f"| all | {sum(row['seconds'] for row in result['rows']):.0f} | "
        f"{max(row['peak_gib'] for row in result['rows']):.1f} | |"
    ]
    return "\n".join(lines) + f"\n\nOn {result['device']}; `{result['command']}` measures it again."


def demo_check() -> str:
    result = read_result("demo_check")
    lines = ["| control | its acceptance length | ours | ours minus its, 95 % over prompts |", "|---|---|---|---|"]
    for row in result["rows"]:
        interval = f"{row['difference']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        lines.append(f"| {row['control']} | {row['accept_len']:.3f} | {row['ours']:.3f} | {interval} |")
    return "\n".join(lines)


def extraction() -> str:
    rows: list[dict[str, Any]] = read_result("extraction")["rows"]
    ours = statistics.median(row["capture_tokens_per_s"] for row in rows)
    bare = statistics.median(row["bare_tokens_per_s"] for row in rows)
    return (
        f"Capture into a store runs at {ours:,.0f} tokens/s, a bare transformers forward over the same batches at "
        f"{bare:,.0f}: {ours / bare:.2f} of the limit."
    )


def served() -> str:
    result = read_result("served")
    names = (("engine", f"{result['engine']}, its own count"), ("in_process", "our decoder, along vLLM's text"),
             ("replayed", "training's path, replayed on that text"))  # fmt: skip
    lines = ["| counted by | acceptance length | accepted at position 1, 2, 3 … |", "|---|---|---|"]
    for key, name in names:
        counts = total(Counts(row[key]["verifications"], tuple(row[key]["accepted"])) for row in result["rows"])
        lines.append(f"| {name} | {counts.length:.3f} | {' '.join(f'{rate:.3f}' for rate in counts.rates)} |")
    equal = sum(row["parting"] is None for row in result["rows"])
    return "\n".join(lines) + (
        f"\n\n{len(result['rows'])} prompts, {sum(row['tokens'] for row in result['rows']):,} tokens; {equal} texts "
        f"are those that vLLM writes without the drafter, the others part at bf16 ties. On {result['device']}; "
        f"`{result['command']}` measures it again."
    )


def training_step() -> str:
    result = read_result("training_step")
    lines = ["| shape, 75 % supervised | ours, tokens/s | speculators 0.9.0 | ratio | of the matrix rate |",
             "|---|---|---|---|---|"]  # fmt: skip
    for shape, told in (("llama8b", "Llama 8B, K 7"), ("kimi", "Kimi-K2.5, K 3")):
        rows = [row for row in result["rows"] if row["shape"] == shape and "error" not in row]
        ours = next(row for row in rows if row["who"] == "ours" and row["supervised"] == 0.75)
        peer = next(row for row in rows if row["who"] == "speculators 0.9.0")
        ratio = ours["tokens_per_s"] / peer["tokens_per_s"]
        lines.append(f"| {told} | {ours['tokens_per_s']:,.0f} | {peer['tokens_per_s']:,.0f} | {ratio:.2f} | "
                     f"{ours['share_of_matrix_rate']:.0%} |")  # fmt: skip
    return "\n".join(lines) + (
        f"\n\nOne {result['device']}, 4 rows of 2,048 tokens, both in one run; the share counts only products that "
        f"a step needs. `{result['command']}`."
    )


BLOCKS = {
    "quickstart": quickstart,
    "demo_check": demo_check,
    "extraction": extraction,
    "served": served,
    "training_step": training_step,
}


def rendered(text: str) -> str:
    """`text` with every figures block made anew; KeyError for a block that nothing makes."""

    def block(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- figures:{name} -->\n{BLOCKS[name]()}\n<!-- /figures -->"

    return re.sub(r"<!-- figures:(\w+) -->\n.*?<!-- /figures -->", block, text, flags=re.DOTALL)


if __name__ == "__main__":
    for measured in sorted(FRESH.glob("*.json")):
        shutil.copy(measured, RESULTS / measured.name)
    README.write_text(rendered(README.read_text()))
