"""Faults on ranks, at every phase from compile to the end of a script: do all ranks say who failed, where and why, in time?

    python benchmarks/faults.py [--instructions 68] [--jobs 3] [--markdown benchmarks/results/faults.md]

Faults of phases: 2 to 4 ranks compile, train, evaluate, gather and save; one of them fails in a phase in one of seven ways, or makes
a mistake (skips a step, has another model). Right is an error on each other rank that names the rank and the cause within the timeout
plus 2 seconds.

Faults at instructions: 2 to 4 ranks train a chain with a skip and a tied weight for four steps; one fails before a random instruction.
Right is, besides, the action in the errors, and a second start that goes on at the step of the fault and has the losses of a training
without one, to the last bit.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from pipecompile.schedules import compared_names

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.distributed import fault_phases
from tests.distributed.fault_phases import BETWEEN, ENDING, INSIDE, MISTAKES, PhaseFault
from tests.distributed.faults import FORK, KINDS, MORE_KINDS, STEPS, Ended, Fault, Job, Trial, faults_of, warm

TRAINING = compared_names()
MOST = 10_000
BEFORE_COMPILE = ("model", "options", "frozen")


class Row(NamedTuple):
    """A fault and its end. `seconds` is the time from the fault until the last other rank had raised, `limit` what is allowed."""

    number: int
    place: str
    kind: str
    rank: int
    world: int
    schedule: str
    seconds: float
    said: str
    wrong: list[str]


def phase_faults(chance: random.Random) -> list[PhaseFault]:
    """Return every way to end in every phase, and every mistake."""
    pairs = [(phase, kind) for phase in (*INSIDE, *BETWEEN) for kind in ENDING]
    pairs += [("before compile" if kind in BEFORE_COMPILE else "before a step", kind) for kind in MISTAKES]
    return [_phase_fault(chance, phase, kind) for phase, kind in pairs]


def _phase_fault(chance: random.Random, phase: str, kind: str) -> PhaseFault:
    world, copies = chance.choice([(2, 1), (2, 1), (3, 1), (4, 1), (4, 2)])
    ranks = [0, world - 1] if kind in ("skip", "samples") else range(world)  # a rank in the middle reads no samples
    fault = PhaseFault(
        phase, kind, chance.choice(ranks), world, copies, chance.choice(["gpipe", "1f1b", "interleaved", "zbv"])
    )
    if (
        kind == "samples" and fault.schedule == "zbv"
    ):  # one rank has the first and the last stage: it alone reads samples
        return replace(fault, schedule="1f1b")
    # a metric is called where the last stage is
    return replace(fault, rank=world - 1, schedule="1f1b") if phase == "metric" else fault


def instruction_faults(chance: random.Random, count: int, *, is_direct: bool) -> list[Job]:
    """Return faults at random instructions, of each kind in turn."""
    kinds = KINDS if is_direct else (*KINDS, *MORE_KINDS)
    return [replace(_drawn(chance, kinds[number % len(kinds)]), is_direct=is_direct) for number in range(count)]


def _drawn(chance: random.Random, kind: str) -> Job:
    world = chance.choice([2, 2, 3, 4])
    fault = Fault(kind, chance.randrange(world), chance.randrange(1, STEPS - 1), chance.randrange(MOST))
    return Job(chance.choice(TRAINING), world, fault)


def row_of_phase(number: int, fault: PhaseFault, folder: Path) -> Row:
    wrong, said, seconds = fault_phases.tried(fault, folder)
    texts = [text for rank, text in enumerate(said) if rank != fault.rank]
    schedule = f"{fault.schedule}, 2 copies" if fault.copies > 1 else fault.schedule
    return Row(number, fault.phase, fault.kind, fault.rank, fault.world, schedule, seconds, texts[0], wrong)


def row_of_instruction(number: int, job: Job, folder: Path) -> Row:
    assert job.fault is not None
    trial = Trial(job, folder / "faulty")
    ended = trial.start()
    if not trial.is_struck:
        return Row(
            number, "", job.fault.kind, job.fault.rank, job.world, job.schedule, 0.0, "", [f"no fault: {ended.logs}"]
        )
    wrong, at = faults_of(trial, ended), trial.note["time"]
    late = max(end for rank, end in enumerate(ended.times) if rank != job.fault.rank) - at
    wrong += failures("the second start", trial.start())
    plain = Trial(replace(job, fault=None), folder / "plain")
    wrong += failures("a start without a fault", plain.start())
    if not wrong and trial.losses != plain.losses:
        wrong.append(f"losses {trial.losses}")
    log = ended.logs[1 if job.fault.rank == 0 else 0]
    said = next((line for line in reversed(log.splitlines()) if "RunError" in line), log[-200:])
    return Row(
        number, trial.note["instruction"], job.fault.kind, job.fault.rank, job.world, job.schedule, late, said, wrong
    )


def failures(what: str, ended: Ended) -> list[str]:
    """Return which ranks failed, and the last that they said."""
    pairs = zip(ended.codes, ended.logs, strict=True)
    return [f"{what} ended with {code}: {said[-300:]}" for code, said in pairs if code]


def work(faults: Sequence[tuple[int, Job | PhaseFault]], out: Path) -> None:
    """Try faults one after the other, and append a row for each to a file."""
    for number, fault in faults:
        with tempfile.TemporaryDirectory() as folder:
            try_one = row_of_phase if isinstance(fault, PhaseFault) else row_of_instruction
            row = try_one(number, fault, Path(folder))  # type: ignore[arg-type]
        with out.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
        print(number, fault, f"{row.seconds:.1f} s", *row.wrong, sep="  ", flush=True)


def rows_of(files: Sequence[Path]) -> list[Row]:
    """Return the rows in files; of a fault that was tried again, the last."""
    lines = (line for file in files if file.exists() for line in file.read_text().splitlines())
    return sorted({row.number: row for row in (Row(*json.loads(line)) for line in lines)}.values())


def tried(faults: Sequence[Job | PhaseFault], jobs: int, earlier: Sequence[Row] = ()) -> list[Row]:
    """Return the rows of all faults, tried by so many processes beside each other, but those that were right `earlier`."""
    right = {row.number: row for row in earlier if not row.wrong}
    numbered = [(number, fault) for number, fault in enumerate(faults, 1) if number not in right]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(index) for index in range(jobs)]
        workers = [FORK.Process(target=work, args=(numbered[index::jobs], file)) for index, file in enumerate(files)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return sorted([*right.values(), *rows_of(files)])


def table(rows: Sequence[Row]) -> list[str]:
    """Return the counts by kind, then all faults, as lines of Markdown."""
    lines = [
        "| fault | tried | right | seconds until all others had raised: median | longest |",
        "|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys(row.kind for row in rows):
        seconds = sorted(row.seconds for row in rows if row.kind == kind)
        right = sum(not row.wrong for row in rows if row.kind == kind)
        lines.append(f"| {kind} | {len(seconds)} | {right} | {seconds[len(seconds) // 2]:.1f} | {seconds[-1]:.1f} |")
    lines += ["", "| | in | fault | rank | schedule | seconds | another rank | |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        said = row.said.partition("\n")[0].replace("|", "/")[:110]
        verdict = "right" if not row.wrong else "WRONG"
        lines.append(
            f"| {row.number} | {row.place} | {row.kind} | {row.rank} of {row.world} | {row.schedule} | {row.seconds:.1f} | {said} | {verdict} |"
        )
    wrong = [f"{row.number}: {'; '.join(row.wrong)}".replace("\n", " ") for row in rows if row.wrong]
    return [*lines, *["", "Not right:", ""] * bool(wrong), *wrong]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instructions", type=int, default=68, help="number of faults at random instructions")
    parser.add_argument("--phases", type=int, default=1_000, help="number of faults of phases, at most")
    parser.add_argument("--jobs", type=int, default=1, help="faults that are tried beside each other")
    parser.add_argument("--rows", type=Path, help="a file of rows, to go on with those that were not right in it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--direct", action="store_true", help="at instructions, values go as between GPUs, with gloo for NCCL"
    )
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warm()
    chance, start = random.Random(options.seed), time.perf_counter()
    faults = [
        *phase_faults(chance)[: options.phases],
        *instruction_faults(chance, options.instructions, is_direct=options.direct),
    ]
    rows = tried(faults, options.jobs, rows_of([options.rows] if options.rows else []))
    if options.rows:
        options.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = f"`python benchmarks/faults.py {' '.join(arg for arg in sys.argv[1:] if arg.startswith('--') or arg.isdigit())}`"
    title = f"{command.replace(' --markdown', '')}, torch {torch.__version__}, {(time.perf_counter() - start) / 60:.0f} minutes."
    right = sum(not row.wrong for row in rows)
    text = "\n".join(["# Faults", "", title, "", f"{right} of {len(faults)} right.", "", *table(rows), ""])
    print(text)
    if options.markdown:
        options.markdown.write_text(text)


if __name__ == "__main__":
    main()
