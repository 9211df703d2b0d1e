"""Random damages to schedules and programs: what the verifier says, and what a brute-force run says.

    python benchmarks/mutations.py [--programs 14000] [--schedules 6000] [--slices 4500] [--markdown benchmarks/results/mutations.md]

Legal schedules of all kinds, with skips, tied parameters, split backwards and recomputation, are damaged in one place. The
run (tests/support/program_executor.py) steps all devices with labels in place of tensors, under each model of communication. Schedules
of slices have a run of their own (tests/support/sliced_schedules.py).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from damages import (  # noqa: E402 found beside the tests
    DAMAGES,
    SCHEDULE_DAMAGES,
    damaged,
    damaged_schedule,
    exchanged,
    is_legal,
    random_program,
    random_schedule,
    schedule_works,
    works,
)
from program_executor import MODELS  # noqa: E402
from sliced_schedules import SLICE_DAMAGES, damaged_slices, random_sliced, sliced_works  # noqa: E402

Count = Counter[str]


def of_program(rng: Random, how: str) -> Count:
    """One damage, judged under all models together, and each by itself."""
    program = random_program(rng)
    ways = {way.__name__: way for way in DAMAGES}
    damage = exchanged(rng, program) if how == "exchanged" else damaged(rng, program, ways[how])
    judged = {models: (works(damage, models), is_legal(damage, models)) for models in (MODELS, *((m,) for m in MODELS))}
    found = _count(*judged[MODELS])
    found["disagreements"] = sum(right != legal for right, legal in judged.values())
    found["stuck in one model only"] = len({right for right, _ in judged.values()}) > 1
    return found


def of_schedule(rng: Random, how: str) -> Count:
    damage = damaged_schedule(rng, random_schedule(rng), how)
    return _count(schedule_works(damage), is_legal(damage))


def of_slices(rng: Random, how: str) -> Count:
    damage = damaged_slices(rng, random_sliced(rng), how)
    return _count(sliced_works(damage), is_legal(damage))


def _count(right: bool, legal: bool) -> Count:
    return Counter({"damages": 1, "wrong": not right, "flagged": not legal, "disagreements": right != legal})


def page(programs: dict[str, Count], schedules: dict[str, Count], slices: dict[str, Count]) -> str:
    """All tables as markdown."""
    every = sum([*programs.values(), *schedules.values(), *slices.values()], Counter())
    lines = [
        "# The verifier and a brute-force run on random damages",
        "",
        f"Written by `benchmarks/mutations.py`: {every['damages']} damages, {every['wrong']} of them harmful; "
        f"{every['disagreements']} on which the two disagree. A program is judged under all models of communication together,",
        "and under each alone; the last column counts those that are right in some and wrong in others.",
        "",
        "| damage of a program | number | wrong | flagged | disagreements | wrong in some models only |",
        "|---|---|---|---|---|---|",
        *(_line(how, count, last=True) for how, count in programs.items()),
        "",
        "| damage of a schedule | number | wrong | flagged | disagreements |",
        "|---|---|---|---|---|",
        *(_line(how, count, last=False) for how, count in schedules.items()),
        "",
        "| damage of a schedule of slices | number | wrong | flagged | disagreements |",
        "|---|---|---|---|---|",
        *(_line(how, count, last=False) for how, count in slices.items()),
    ]
    return "\n".join(lines) + "\n"


def _line(how: str, count: Count, *, last: bool) -> str:
    names = ["damages", "wrong", "flagged", "disagreements", *(["stuck in one model only"] if last else [])]
    return f"| {how.replace('_', ' ')} | {' | '.join(str(int(count[name])) for name in names)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=14_000)
    parser.add_argument("--schedules", type=int, default=6_000)
    parser.add_argument("--slices", type=int, default=4_500)
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    arguments = parser.parse_args()
    ways = [*(way.__name__ for way in DAMAGES), "exchanged"]
    programs = {how: Counter[str]() for how in ways}
    schedules = {how: Counter[str]() for how in SCHEDULE_DAMAGES}
    for number in range(arguments.programs):
        how = ways[number % len(ways)]
        programs[how].update(of_program(Random(f"program {number}"), how))
    for number in range(arguments.schedules):
        how = SCHEDULE_DAMAGES[number % len(SCHEDULE_DAMAGES)]
        schedules[how].update(of_schedule(Random(f"schedule {number}"), how))
    slices = {how: Counter[str]() for how in SLICE_DAMAGES}
    for number in range(arguments.slices):
        how = SLICE_DAMAGES[number % len(SLICE_DAMAGES)]
        slices[how].update(of_slices(Random(f"slices {number}"), how))
    text = page(programs, schedules, slices)
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text)


if __name__ == "__main__":
    main()
