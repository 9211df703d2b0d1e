"""What ranks launch on GPUs, held to the rules of NCCL by a fake: random programs of all schedules, and traps put in on purpose.

    python benchmarks/rank_launches.py [--programs 10000] [--jobs 2] [--markdown benchmarks/results/rank_launches.md]

Every program runs on 2 to 8 ranks, with skips, ties, uneven micro-batches, recomputation, early receives and copies of the pipeline
as drawn, under nine sets of rules: streams apart, all communicators of a device in one queue, or all launches of a device in one
queue; and a send waits for its receive, or waits and is announced by the host of the sender first, or does not wait. Then its
launches run, in a random order that the rules allow, and each compute checks the values that it reads. Exits with 1 if a program
does not end, or computes with a wrong value. Nothing here needs a GPU, and nothing here ran on one.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.nccl_rules import Deadlock
from tests.support.rank_programs import check, drawn_program


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a program: its launches on all ranks, and what went wrong, if anything did."""

    seed: int
    schedule: str
    n_devices: int
    features: tuple[str, ...]
    launches: int
    wrong: str


def outcome(seed: int) -> Outcome:
    torch.set_num_threads(1)
    drawn, wrong, launches = drawn_program(seed), "", 0
    try:
        launches = check(drawn)
    except (Deadlock, AssertionError, TypeError) as error:
        wrong = f"{type(error).__name__}: {error}"
    return Outcome(seed, drawn.schedule, drawn.program.n_devices, drawn.features, launches, wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    start, found = perf_counter(), []
    with ProcessPoolExecutor(options.jobs) as pool:
        for each in pool.map(outcome, range(options.programs), chunksize=25):
            found.append(each)
            if each.wrong:
                print(f"seed {each.seed}: {each.wrong}", flush=True)
            if len(found) % 1000 == 0:
                print(len(found), f"{perf_counter() - start:.0f} s", flush=True)
    text = report(found, f"--programs {options.programs} --jobs {options.jobs}", perf_counter() - start)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    sys.exit(any(each.wrong for each in found))


def report(found: list[Outcome], arguments: str, seconds: float) -> str:
    launches = sum(each.launches for each in found)
    lines = [
        "# Launches of ranks, held to the rules of NCCL", "",
        f"`python benchmarks/rank_launches.py {arguments}`, {seconds / 60:.0f} minutes on a CPU. No GPU was used.", "",
        f"{len(found):,} random programs, {launches:,} launches, each program under nine sets of rules and run once: "
        f"{sum(bool(each.wrong) for each in found)} did not end or computed with a wrong value.", "",
        "| schedule | programs | ended | skips | ties | uneven micro-batches | copies | sharded copies |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for schedule in sorted({each.schedule for each in found}):
        some = [each for each in found if each.schedule == schedule]
        count = Counter(feature for each in some for feature in each.features)
        ended = sum(not each.wrong for each in some)
        features = ("skips", "ties", "uneven micro-batches", "copies", "sharded copies")
        lines.append(f"| {schedule} | {len(some)} | {ended} | {' | '.join(str(count[name]) for name in features)} |")
    ranks = Counter(each.n_devices for each in found)
    lines += ["", "Ranks of a pipeline: " + ", ".join(f"{n}: {ranks[n]}" for n in sorted(ranks)) + " programs.", ""]
    return "\n".join([*lines, *(f"- seed {each.seed}: {each.wrong}" for each in found if each.wrong)])


if __name__ == "__main__":
    main()
