"""Faults at random instructions of random ranks, under random schedules: do all ranks say what happened, end, and go on?

    python benchmarks/faults.py [--faults 100] [--markdown benchmarks/results/faults.md]

2 to 4 ranks train a chain with a skip and a tied weight for four steps; in one of them a rank raises, is killed, or stalls for
longer than the timeout. Right is a start that ends on all ranks with an error, in time, with the right report on each of the
others, and a second start that goes on at the step of the fault and has the losses of a training without one, to the last bit.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from pipecompile.schedules import compared_names

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.distributed.faults import KINDS, STEPS, Ended, Fault, Job, Trial, faults_of, warm

TRAINING = compared_names()
MOST = 10_000

Losses = list[dict[int, float]]
"""Per rank those of its steps."""


def drawn(chance: random.Random, kind: str) -> Job:
    world = chance.choice([2, 2, 3, 4])
    fault = Fault(kind, chance.randrange(world), chance.randrange(1, STEPS - 1), chance.randrange(MOST))
    return Job(chance.choice(TRAINING), world, fault)


def tried(job: Job, folder: Path, references: dict[tuple[str, int], Losses]) -> tuple[list[str], float]:
    """What was wrong, and the seconds from the fault until the last other rank had ended."""
    assert job.fault is not None
    trial = Trial(job, folder / "faulty")
    ended = trial.start()
    if not trial.is_struck:
        return [f"no fault happened: {ended.logs}"], 0.0
    wrong, at = faults_of(trial, ended), trial.note["time"]
    late = max(end for rank, end in enumerate(ended.times) if rank != job.fault.rank) - at
    wrong += failures("the second start", trial.start())
    if (job.schedule, job.world) not in references:
        plain = Trial(replace(job, fault=None), folder / "plain")
        if failed := failures("a start without a fault", plain.start()):
            return wrong + failed, late
        references[job.schedule, job.world] = plain.losses
    if trial.losses != references[job.schedule, job.world]:
        wrong.append(f"losses {trial.losses}")
    return wrong, late


def failures(what: str, ended: Ended) -> list[str]:
    """Which ranks failed, and the last that they said."""
    pairs = zip(ended.codes, ended.logs, strict=True)
    return [f"{what} ended with {code}: {said[-300:]}" for code, said in pairs if code]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--direct", action="store_true", help="values go as between GPUs, with gloo for NCCL")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warm()
    chance, start = random.Random(options.seed), time.perf_counter()
    references: dict[tuple[str, int], Losses] = {}
    right, seconds, failed = Counter[str](), {kind: list[float]() for kind in KINDS}, list[str]()
    for number in range(options.faults):
        kind = KINDS[number % len(KINDS)]
        job = replace(drawn(chance, kind), is_direct=options.direct)
        with tempfile.TemporaryDirectory() as folder:
            wrong, late = tried(job, Path(folder), references)
        right[kind] += not wrong
        seconds[kind].append(late)
        failed += [f"{job}: {'; '.join(wrong)}"] * bool(wrong)
        print(number, job, f"{late:.1f} s", *wrong, sep="  ", flush=True)
    rows = [
        f"| {kind} | {len(late)} | {right[kind]} | {statistics.median(late):.1f} | {max(late):.1f} |"
        for kind, late in seconds.items()
        if late
    ]
    head = ["| fault | tried | right | seconds until all had ended: median | longest |", "|---|---|---|---|---|"]
    command = (
        f"`python benchmarks/faults.py --faults {options.faults} --seed {options.seed}{' --direct' * options.direct}`"
    )
    title = f"{command}, torch {torch.__version__}, {(time.perf_counter() - start) / 60:.0f} minutes."
    text = "\n".join(["# Faults", "", title, "", *head, *rows, *["", "Not right:", "", *failed] * bool(failed), ""])
    print(text)
    if options.markdown:
        options.markdown.write_text(text)


if __name__ == "__main__":
    main()
