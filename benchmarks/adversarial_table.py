"""The committed table of the adversarial zoo: a count of outcomes, what is not right and why, and a row per model."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["progress", "table", "verdict"]

Row = dict[str, Any]

PHASES = ("compile", "step 1", "step 2", "step 3", "batch size", "length", "evaluation", "eager again")
WORST = ("WRONG", "failed", "refused", "warned", "anew", "right")

HEAD = """# The adversarial zoo

Models of public libraries with random weights and *everything random on*: dropout, layer drop, SpecAugment, noise. Made by

    python benchmarks/adversarial.py {options}&& python benchmarks/adversarial.py --markdown benchmarks/results/adversarial.md

on {machine}, torch {torch}, {libraries}. A model and its twin of the same seed live through the same story, the model in a pipeline of
three stages and two micro-batches, the twin in a plain loop over the micro-batches: a step, a change, a step, another change, a step,
a step with 5 samples, one of another length, an evaluation, and one step of the user's own model in eager. After each, loss,
gradients, parameters, buffers, attributes, keys of the state_dict and the states of all generators of random numbers are compared.
The schedule takes one micro-batch after the other, so that random numbers are drawn in the order of the loop. A change that eager
itself does not bear is replaced by another one; where micro-batches were divided otherwise after a warning, dropout draws otherwise.

| outcome | meaning |
|---|---|
| right | equal in everything |
| anew | equal, and the model was recorded anew |
| warned | different, after a warning that names the cause |
| refused | an error of pipecompile with its reason |
| failed | another error |
| WRONG | silently different |
"""


def verdict(row: Row) -> str:
    """Return the worst outcome of a model; "skipped" if there is none, "unfinished" if time was up."""
    if "skipped" in row:
        return "skipped"
    outcomes = {row[phase] for phase in PHASES if phase in row}
    if "WRONG" not in outcomes and "failed" not in outcomes and "ended" in row:
        return "unfinished"
    return next((outcome for outcome in WORST if outcome in outcomes), "unfinished")


def progress(row: Row, seconds: float) -> str:
    phases = " ".join(f"{row[phase]}" for phase in PHASES if phase in row)
    return f"[{seconds:5.0f}s] {row['library']} {row['name']} ({row['seconds']} s): {verdict(row)} | {phases} {_why(row)[:300]}"


def _why(row: Row) -> str:
    if "skipped" in row:
        return str(row["skipped"])
    reasons = [f"{p}: {row[f'{p}: why']}" for p in PHASES if row.get(p) not in (None, "right", "anew")]
    text = "; ".join([*reasons, *([row["ended"]] if "ended" in row else [])])
    return re.sub(r"/\S*/(site-packages|benchmarks)/", "", " ".join(text.split()))


def table(rows: Sequence[Row]) -> str:
    """Return the whole page as markdown."""
    latest = {(row["library"], row["name"]): row for row in rows}
    chosen = sorted(latest.values(), key=lambda row: (row["library"].lower(), row["name"]))
    examined = [row for row in chosen if verdict(row) != "skipped"]
    libraries = ", ".join(f"{name} {_version(name)}" for name in dict.fromkeys(row["library"] for row in examined))
    head = HEAD.format(options="", machine=platform.machine(), torch=version("torch"), libraries=libraries)
    return "\n".join([head, _summary(examined), _reasons(examined), _left_out(chosen), _models(examined)])


def _version(library: str) -> str:
    try:
        return version({"smp": "segmentation_models_pytorch"}.get(library, library))
    except PackageNotFoundError:
        return ""


def _summary(rows: Sequence[Row]) -> str:
    count = Counter(verdict(row) for row in rows)
    phases = Counter(row[phase] for row in rows for phase in PHASES if phase in row)
    names = [name for name in (*reversed(WORST), "unfinished") if count[name] or phases[name]]
    lines = [
        f"| {len(rows)} models of {len({row['library'] for row in rows})} libraries | {' | '.join(names)} |",
        f"|---{'|--:' * len(names)}|",
        f"| models, by their worst phase | {' | '.join(str(count[name]) for name in names)} |",
        f"| phases | {' | '.join(str(phases[name]) for name in names)} |",
    ]
    return "\n".join(lines) + "\n"


def _reasons(rows: Sequence[Row]) -> str:
    lines = [
        f"- {row['library']} {row['name']}, {verdict(row)}: {_why(row)[:500]}"
        for row in rows
        if verdict(row) not in ("right", "anew")
    ]
    return "## What is not right, and why\n\n" + "\n".join(lines) + "\n" if lines else ""


def _left_out(rows: Sequence[Row]) -> str:
    skipped = [f"{row['library']} {row['name']} ({row['skipped']})" for row in rows if verdict(row) == "skipped"]
    return f"Left out: {'; '.join(skipped)}.\n" if skipped else ""


def _models(rows: Sequence[Row]) -> str:
    lines = [
        f"| model | {' | '.join(PHASES)} | changes | stages | s |",
        f"|---{'|---' * len(PHASES)}|---|--:|--:|",
    ]
    for row in rows:
        cells = [f"{row['library']}: {row['name']}", *(row.get(phase, "") for phase in PHASES)]
        cells += [", ".join(row.get("changes", ())), str(row.get("stages", "")), str(row["seconds"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "## Every model\n\n" + "\n".join(lines) + "\n"
