"""Is what is launched on GPUs what `simulate` predicts? A discrete-event run of the launch plan beside the simulated program.

    python benchmarks/launches.py [--quick] [--markdown benchmarks/results/launches.md]

Every schedule of the catalogue, 2 to 8 devices, even and uneven stages, chains and skips, copies of 5, 10 and 25 % of a forward,
inputs and targets that come from the host in 0, 0.3 and 1.5 forwards, with a host that launches at once, in a tenth of a forward
each, or all cells in one launch of that time. Exits with 1 if the makespan of any differs by more than 0.5 %. Nothing here needs a
GPU, and nothing here ran on one.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import perf_counter

import pipecompile as pc
from pipecompile.ir import HOST, Program, Route, chain
from pipecompile.passes import lower
from pipecompile.runtime.launch_timeline import simulate_launches
from pipecompile.schedules import CATALOGUE, compared_names
from pipecompile.simulation.costs import CostOptions

LIMIT = 0.005
"""The largest share by which the two makespans may differ."""

UNEVEN = (1.0, 0.8, 1.2, 0.9, 1.1, 0.85, 1.15, 1.0, 0.95, 1.05, 1.1, 0.9, 1.2, 0.8, 1.0, 1.0)
COPIES = (0.05, 0.1, 0.25)
INPUTS = ((0.0, 0.0, "one"), (0.3, 0.0, "one"), (1.5, 0.0, "one"), (0.3, 0.1, "one"), (0.3, 0.1, "step"))
"""Seconds of the copy of an input from the host, and of a launch, and what the host launches at once."""


@dataclass(frozen=True, slots=True)
class Case:
    """One program: a schedule on so many devices, with a skip over all stages or without."""

    schedule: str
    devices: int
    count: int
    skips: bool

    @property
    def program(self) -> Program:
        chunks = CATALOGUE[self.schedule].chunks or 1 + ("interleaved" in self.schedule or "looped" in self.schedule)
        schedule = pc.build_schedule(self.schedule, self.devices * chunks, self.count, n_devices=self.devices)
        routes = chain(schedule.n_stages)
        last = schedule.n_stages - 1
        skip = [Route("skip", 0, (last,))] if self.skips and last > 1 else []
        inputs = [Route(name, HOST, (stage,), 1.0, gradient=False) for name, stage in (("x", 0), ("target", last))]
        return lower(schedule, (*routes, *skip, *inputs), overlap=True)


@dataclass(frozen=True, slots=True)
class Result:
    """How much longer the launches of a program take than simulated, as a share."""

    case: Case
    uneven: bool
    copy: float
    inputs: tuple[float, float, str]
    share: float

    def __str__(self) -> str:
        case = self.case
        from_host, launch, hosts = self.inputs
        costs = f"copy={self.copy} input={from_host} launch={launch}" + " in one graph" * (hosts == "step")
        return f"P={case.devices} M={case.count} {costs}{' uneven' * self.uneven}{' skip' * case.skips}"


def cases(devices: tuple[int, ...]) -> Iterator[Case]:
    for schedule in compared_names():
        for n in devices:
            for count in (2 * n, 4 * n):
                for skips in (False, True):
                    yield Case(schedule, n, count, skips)


def results(case: Case) -> Iterator[Result]:
    program = case.program
    for uneven in (False, True):
        each = [UNEVEN[s % 16] if uneven else 1.0 for s in range(program.n_stages)]
        for copy, inputs in product(COPIES, INPUTS):
            costs = CostOptions(forward=each, input_grad=each, weight_grad=each, transfer=copy)
            costs |= CostOptions(host_latency=inputs[0], launch=inputs[1], hosts=inputs[2])
            share = simulate_launches(program, **costs).makespan / pc.simulate(program, **costs).makespan - 1
            yield Result(case, uneven, copy, inputs, share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 and 4 devices")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    start = perf_counter()
    found: dict[str, list[Result]] = defaultdict(list)
    for case in cases((2, 4) if options.quick else (2, 3, 4, 6, 8)):
        found[case.schedule] += results(case)
    text = report(found, perf_counter() - start, options.quick)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    sys.exit(any(abs(result.share) > LIMIT for some in found.values() for result in some))


def report(found: dict[str, list[Result]], seconds: float, quick: bool) -> str:
    command = f"`python benchmarks/launches.py{' --quick' * quick}`, {seconds:.0f} s on a CPU. No GPU was used."
    lines = ["# Launches against the simulated program", "", command, ""]
    lines += ["| schedule | runs | within 0.5 % | shortest | longest | the longest |", "|---|--:|--:|--:|--:|---|"]
    for schedule, some in found.items():
        low, high = min(result.share for result in some), max(some, key=lambda result: result.share)
        equal = sum(abs(result.share) <= LIMIT for result in some)
        lines.append(f"| {schedule} | {len(some)} | {equal} | {low:+.2%} | {high.share:+.2%} | {high} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
