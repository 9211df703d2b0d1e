"""The committed table of a sweep: a summary per library, what failed and why, and a row per model."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

__all__ = ["EQUAL", "is_equal", "table"]

Row = dict[str, Any]

EQUAL = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}
"""Up to which relative difference two results are the same numbers added in another order, by the coarsest dtype that the
model computes in. Random weights amplify the last bit by three to five digits; an error in a gradient shows in the first.
"""

PACKAGES = {
    "smp": "segmentation_models_pytorch",
    "timm": "timm",
    "torchvision": "torchvision",
    "transformers": "transformers",
}

HEAD = """# The zoo

Models of public libraries with random weights and small inputs, each compared with itself in eager PyTorch. Made by

    python benchmarks/zoo.py --jobs {jobs} && python benchmarks/zoo.py --markdown benchmarks/results/zoo.md

on {machine}, torch {torch}, {libraries}, pipecompile at {commits}. Seconds are CPU seconds of one thread.

*Recorded* is one evaluation-mode recording at batch 2; *output* is how far it is from eager at batch 3. *Trained* is compiled
for 4 samples, cut into 3 stages, and takes one step with 5, as micro-batches of 3 and 2: *gradient* is how far the farthest
gradient is from that of a plain loop over the same micro-batches, relative to the largest number in it; loss and buffers are
held to the same. 0 is bit-equal. Training runs in float64 where the model can, so that another order of the same sum (a value
that is used twice in a later stage) is told from an error: *equal* is {equal}, by the coarsest dtype inside the model. Random
draws are off. *State* is equal keys, order, shapes and ties, and strict loading both ways. The last columns say whether
`torch.fx.symbolic_trace` and `torch.export.export(strict=False)` take the same model in evaluation mode, and the seconds of export;
a sweep with `--ours` does not ask them.
"""


def is_equal(row: Row) -> bool:
    """Did everything that was asked of this model come out as in eager?"""
    limit = EQUAL.get(row.get("rounding", "float32"), 1e-4)
    figures = ("output", "loss", "gradient", "buffers")
    return "error" not in row and "state" in row and all(row.get(key, 1.0) <= limit for key in figures)


def table(rows: Sequence[Row], waiting: Sequence[str] = ()) -> str:
    """The whole page as markdown. `waiting` names the models that were not examined yet."""
    latest = {(row["library"], row["name"]): row for row in rows}
    chosen = sorted(latest.values(), key=lambda row: (row["library"], row.get("group", ""), row["name"]))
    libraries = list(dict.fromkeys(row["library"] for row in chosen))
    versions = ", ".join(f"{name} {version(PACKAGES[name])}" for name in libraries if name in PACKAGES)
    known = {row.get("commit", "") for row in chosen}
    commits = known.pop() if len(known) == 1 else "several commits"
    equal = ", ".join(f"{limit:g} in {dtype}" for dtype, limit in EQUAL.items())
    head = HEAD.format(jobs=1, machine=platform.machine(), torch=version("torch"), libraries=versions, commits=commits, equal=equal)  # fmt: skip
    parts = [head, _summary(chosen), _failures(chosen), _waiting(waiting)]
    for library in libraries:
        mine = [row for row in chosen if row["library"] == library and "skipped" not in row]
        parts.append(f"## {library}\n\n{_models(mine)}")
    return "\n".join(parts)


def _waiting(names: Sequence[str]) -> str:
    return f"Not examined in this sweep: {len(names)} ({', '.join(names)}).\n" if names else ""


def _summary(rows: Sequence[Row]) -> str:
    lines = [
        "| | models | recorded | output equal | trained equal | state equal | `symbolic_trace` | `export` | median s to record | median s to export |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if "skipped" not in row:
            name = f"torchvision {row['group']}" if row["library"] == "torchvision" else row["library"]
            groups.setdefault(name, []).append(row)
    lines += [_total(name, found) for name, found in groups.items()]
    skipped = [row for row in rows if "skipped" in row]
    reasons = dict.fromkeys(row["skipped"] for row in skipped)
    left_out = (
        f"\nLeft out: {len(skipped)} ({', '.join(row['name'] for row in skipped)}): {'; '.join(reasons)}.\n"
        if skipped
        else ""
    )
    return "\n".join(lines) + "\n" + left_out


def _total(name: str, rows: Sequence[Row]) -> str:
    def count(holds: Callable[[Row], bool]) -> int:
        return sum(map(holds, rows))

    def taken(tracer: str) -> str:
        asked = count(lambda row: tracer in row or f"{tracer}_error" in row)
        return f"{count(lambda row: tracer in row)} of {asked}" if asked else ""

    cells = [
        name,
        len(rows),
        count(lambda row: "nodes" in row),
        count(lambda row: row.get("output", 1.0) <= EQUAL["float32"]),
        count(is_equal),
        count(lambda row: "state" in row),
        taken("symbolic_trace"),
        taken("export"),
        _median(row["trace"] for row in rows if "trace" in row),
        _median(row["export"] for row in rows if "export" in row),
    ]
    return f"| {' | '.join(map(str, cells))} |"


def _median(numbers: Any) -> str:
    found = list(numbers)
    return f"{statistics.median(found):.2f}" if found else ""


def _failures(rows: Sequence[Row]) -> str:
    failed = [row for row in rows if "skipped" not in row and not is_equal(row)]
    bound = [f"{row['name']} ({', '.join(row['guards'])})" for row in rows if "guards" in row]
    told = (
        f"Recorded anew for another batch size, because the model asks about it: {', '.join(bound)}.\n\n"
        if bound
        else ""
    )
    if not failed:
        return told
    lines = [f"{told}## What is not equal or is refused, and why\n"]
    for row in failed:
        where = f" ({row['where'].split(':  ')[-1]})" if row.get("where") else ""
        figures = ", ".join(
            f"{key} {row[key]:.1e}" for key in ("output", "loss", "gradient", "buffers") if row.get(key)
        )
        why = str(row.get("error", figures)).split("\n", maxsplit=1)[0]
        lines.append(f"- {row['library']} {row['name']}: {why[:300]}{where[:120]}")
    return "\n".join(lines) + "\n"


def _models(rows: Sequence[Row]) -> str:
    lines = [
        "| | nodes | s | x eager | output | loss | gradient | in | state | fx | export |",
        "|---|--:|--:|--:|--:|--:|--:|---|---|---|--:|",
    ]
    for row in rows:
        ratio = f"{row['trace'] / max(row['eager'], 1e-4):.0f}" if "trace" in row else ""
        cells = [
            f"{row.get('group', '')}: {row['name']}" if row["library"] != "smp" else row["name"],
            row.get("nodes", ""),
            f"{row['trace']:.2f}" if "trace" in row else "",
            ratio,
            *(_figure(row, key) for key in ("output", "loss", "gradient")),
            row.get("rounding", "").replace("float", "f"),
            "yes" if "state" in row else "",
            "yes" if "symbolic_trace" in row else "no" if "symbolic_trace_error" in row else "",
            f"{row['export']:.1f}" if "export" in row else "no" if "export_error" in row else "",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def _figure(row: Row, key: str) -> str:
    return "" if key not in row else "0" if row[key] == 0 else f"{row[key]:.0e}"
