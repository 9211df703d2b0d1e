"""Every order of events of small programs: no device waits forever and no message arrives where another is expected.

    python benchmarks/model_checking.py [--devices 4] [--microbatches 3] [--damages 5] [--markdown benchmarks/results/model_checking.md]

For each schedule of the catalogue, lowered for up to `--devices` devices, `--microbatches` micro-batches and 3 stages per device, all
states that its devices can reach are visited under each model of communication. Then messages of each program change places at
random, and the verifier of messages has to accept and refuse the same damaged programs as the exploration of all their states.
Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipecompile.ir import HOST, Op, Program
from pipecompile.passes import lower
from pipecompile.schedules import CATALOGUE, build_schedule
from pipecompile.verifiers.message_models import models_named
from pipecompile.verifiers.pairing import pairing_faults
from tests.support.state_space import explore

MODELS = ("buffered", "rendezvous", "fifo")


def programs(name: str, most_devices: int, most_microbatches: int) -> Iterator[Program]:
    """Yield the program of every size."""
    entry = CATALOGUE[name]
    for n_devices in range(1, most_devices + 1):
        for per_device in (entry.chunks,) if entry.chunks else (1, 2, 3):
            for n_microbatches in range(1, most_microbatches + 1):
                yield lower(build_schedule(name, n_devices * per_device, n_microbatches, n_devices=n_devices))


def damaged(program: Program, rng: Random) -> Program:
    """Return the program with two neighbouring messages between devices in the other order, one to three times."""
    rows = [list(row) for row in program.rows]
    for _ in range(rng.randint(1, 3)):
        row = rng.choice(rows)
        places = [i for i, each in enumerate(row) if each.op in (Op.SEND, Op.RECV) and each.peer != HOST]
        if len(places) > 1:
            first = rng.randrange(len(places) - 1)
            a, b = places[first], places[first + 1]
            row[a], row[b] = row[b], row[a]
    return replace(program, rows=tuple(map(tuple, rows)))


def checked(name: str, devices: int, microbatches: int, damages: int, totals: Counter[str]) -> list[str]:
    """Explore the programs of a schedule and their damages, add up `totals`, and return what disagrees."""
    rng, wrong = Random(name), []
    for program in programs(name, devices, microbatches):
        totals["programs"] += 1
        counts = program.n_stages, program.n_devices, program.n_microbatches
        for model in MODELS:
            explored = explore(program, model)
            totals[model] += explored.states
            if not explored.is_safe:
                wrong.append(f"{name} {counts} {model}: {explored}")
        for changed in (damaged(program, rng) for _ in range(damages)):
            for model in MODELS:
                explored, faults = explore(changed, model), pairing_faults(changed, models_named(model))
                totals["damages"] += 1
                totals["refused"] += bool(faults)
                totals["damaged states"] += explored.states
                if explored.is_safe == bool(faults):
                    wrong.append(f"{name} {counts} {model}, damaged: {explored}, the verifier says {faults[:1]}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=3)
    parser.add_argument("--damages", type=int, default=5)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    began, wrong, lines, sums = perf_counter(), list[str](), list[str](), Counter[str]()
    for name in (name for name, entry in CATALOGUE.items() if not entry.has_slices):
        totals: Counter[str] = Counter()
        wrong += checked(name, options.devices, options.microbatches, options.damages, totals)
        sums += totals
        cells = (totals[key] for key in ("programs", *MODELS, "damages", "refused", "damaged states"))
        lines.append(f"| {name} | " + " | ".join(f"{cell:,}" for cell in cells) + " |")
        print(lines[-1], flush=True)
    cells = (sums[key] for key in ("programs", *MODELS, "damages", "refused", "damaged states"))
    lines.append("| all | " + " | ".join(f"{cell:,}" for cell in cells) + " |")
    print(lines[-1], *wrong, sep="\n")
    if options.markdown:
        options.markdown.write_text(page(lines, wrong, options, perf_counter() - began), encoding="utf-8")
    return 1 if wrong else 0


def page(lines: list[str], wrong: list[str], options: argparse.Namespace, seconds: float) -> str:
    """Return the note: states per schedule and model, and what disagrees."""
    return (
        f"""# All states of small programs

`python benchmarks/model_checking.py --devices {options.devices} --microbatches {options.microbatches} --damages {options.damages}`, {seconds:.0f} s.

Every program of the catalogue with 1 to {options.devices} devices, 1 to {options.microbatches} micro-batches and up to 3 stages on a device. A state says how many
instructions of each device are over; the columns count the states that are reached under each model of communication. In none of
them do all devices wait, and no message arrives where another is expected. Damaged programs have one to three pairs of neighbouring
messages in the other order; each counts once per model, and its states are those of the last column. Disagreements of the
verifier of messages with the exploration: {len(wrong)}.

| schedule | programs | buffered | rendezvous | fifo | damages | refused | states of damages |
|---|---|---|---|---|---|---|---|
"""
        + "\n".join(lines)
        + "".join(f"\n- {each}" for each in wrong)
        + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
