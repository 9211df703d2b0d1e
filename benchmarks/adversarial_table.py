"""The committed table of the adversarial zoo: a count of outcomes, what is not right and why, and a row per model."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["progress", "rows_of_page", "table", "verdict"]

Row = dict[str, Any]

PHASES = ("compile", "step 1", "step 2", "step 3", "batch size", "length", "evaluation", "eager again")
WORST = ("WRONG", "failed", "refused", "warned", "anew", "right")

HEAD = """# The adversarial zoo

Models of public libraries with random weights and *everything random on*: dropout, layer drop, SpecAugment, noise. Made by

    python benchmarks/adversarial.py {options}&& python benchmarks/adversarial.py --markdown benchmarks/results/adversarial.md

on {machine}, {libraries}. A model and its twin of the same seed live through the same story, the model in a pipeline of
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

NOTES = """The 12 int8 models of torchvision have nothing to train. A model is killed after 100 to 400 s on a machine with other
work; the six that needed longer (two SSD, tnt_s, csatv2, FalconH1, KimiLinear) and DeepseekV4ForCausalLM have run without that
limit. Rows of the new libraries are those of an earlier revision, except for those that were not right there and have been mended;
so are the rows of x-transformers and speechbrain that end in PC112, before a list of another length in each run could stay unread:
of these only x_rotary_swiglu has been run again.

The larger models of torchvision have one block in each stage here (Swin and ViT two) and their own widths, and video models get
clips of 32 pixels. Anchors of detection models stayed in their old dtype on the model until a constant that replaces another was
left as in eager; the three rows that showed it were run again.

CTRL and Starcoder2 get a mask of ones and, by the change, `is_causal=False`. transformers leaves a mask of ones away, but not while
it sees fake tensors (`is_tracing`): eager is then not causal, the recording is, and the first step refuses it with the line that
asks. The loss of u_shaped_operator is a sum that cancels to -1.0e-06, and its difference 3e-10, because one micro-batch of 5
samples was run instead of two after the warning. The twelve models of transformers with "or less: ... hooks": eager installs hooks
that collect hidden states in its first call; a pipeline leaves neither hooks nor the note of them, and warns; a later call in eager
installs both.
"""
"""What a reader must know of the rows, beside what the rows say."""


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
    if "reason" in row:
        return str(row["reason"])
    reasons = [f"{p}: {row[f'{p}: why']}" for p in PHASES if row.get(p) not in (None, "right", "anew")]
    text = "; ".join([*reasons, *([row["ended"]] if "ended" in row else [])])
    return re.sub(r"/\S*/(site-packages|benchmarks)/", "", " ".join(text.split()))


def rows_of_page(page: str) -> list[Row]:
    """Return the rows of a page that `table` has written, with the reasons as far as the page has them."""
    versions = dict(
        re.findall(
            r"[ ,]([\w.-]+) (\d\S*?(?: and \d\S*?)*)(?=[,.] )", page.partition("| outcome |")[0].replace("\n", " ")
        )
    )
    reasons = {(a, b): (c, d) for a, b, c, d in re.findall(r"^- (\S+) (.+?), (\w+): (.*)$", page, re.MULTILINE)}
    rows = []
    for line in re.findall(r"^\| (\S+: .*) \|$", page, re.MULTILINE):
        model, *cells, changes, stages, seconds = (cell.strip() for cell in line.split("|"))
        library, name = model.split(": ")
        row: Row = {"library": library, "name": name, "changes": [changes] if changes else [], "stages": stages}
        row |= {"seconds": float(seconds), "version": versions.get(library, ""), "torch": versions["torch"]}
        row |= {phase: cell for phase, cell in zip(PHASES, cells, strict=True) if cell}
        found, reason = reasons.get((library, name), ("", ""))
        row |= ({"reason": reason} if found else {}) | ({"ended": reason} if found == "unfinished" else {})
        rows.append(row)
    left_out = re.findall(r"^Left out: (\S+) (\S+) \((.*)\)\.$", page, re.MULTILINE)
    return rows + [{"library": a, "name": b, "skipped": c, "seconds": 0.0} for a, b, c in left_out]


def table(rows: Sequence[Row]) -> str:
    """Return the whole page as markdown. Of two rows of a model the later counts, unless its library was not installed then."""
    latest = {(row["library"], row["name"]): row for row in rows if not _is_missing(row)}
    chosen = sorted(latest.values(), key=lambda row: (row["library"].lower(), row["name"]))
    examined = [row for row in chosen if verdict(row) != "skipped"]
    known: dict[str, set[str]] = {}
    for row in examined:
        known.setdefault("torch", set()).update(row.get("torch", version("torch")).split(" and "))
        known.setdefault(row["library"], set()).update((row.get("version") or _version(row["library"])).split(" and "))
    libraries = ", ".join(f"{name} {' and '.join(sorted(found))}" for name, found in known.items())
    head = HEAD.format(options="", machine=platform.machine(), libraries=libraries)
    return "\n".join([head, _summary(examined), NOTES, _reasons(examined), _left_out(chosen), _models(examined)])


def _is_missing(row: Row) -> bool:
    return str(row.get("skipped", "")).startswith("not installed")


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
