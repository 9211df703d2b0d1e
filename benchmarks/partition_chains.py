"""Random chains without tensors: is the bottleneck that of exact chains-on-chains partitioning, and how much processor time does it take?

    python benchmarks/partition_chains.py [--chains 10000] [--markdown benchmarks/results/partition_chains.md]

The optimum comes from a program of its own: the least of all sums of neighbours that a greedy cut can stay below, found by
bisection over such sums (Nicol, "Rectilinear partitioning of irregular data parallel computations", 1994). Times are even,
skewed, or whole numbers with zeros; a tenth of the chains has 2,000 nodes.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from time import process_time

from rich.console import Console
from rich.table import Table

from pipecompile.partitioners import Node, Problem, partition

LONGEST = 2000
HEADER = ("nodes", "chains", "as the optimum", "proven", "median ms", "99 % ms", "worst ms")
BANDS = ((1, 10), (11, 100), (101, 1000), (1001, LONGEST))


def best_of_chain(times: Sequence[float], n_stages: int) -> float:
    """The least bottleneck of a chain cut into stages. O(K^2 log^2 n)."""
    sums = [0.0, *accumulate(times)]

    def enough(start: int, stages: int, limit: float) -> bool:
        for _ in range(stages):
            start = bisect_right(sums, sums[start] + limit) - 1
        return start >= len(times)

    best, start = sums[-1], 0
    for left in range(n_stages - 1, 0, -1):
        low, high = start, len(times)
        while low < high:  # the shortest first stage with which the others can stay below it
            middle = (low + high) // 2
            load = sums[middle] - sums[start]
            low, high = (low, middle) if enough(middle, left, load) else (middle + 1, high)
        best = min(best, sums[low] - sums[start])
        start = max(low - 1, start)
    return min(best, sums[-1] - sums[start])


def chain(draw: random.Random) -> tuple[list[float], int]:
    """Times and a number of stages."""
    n = LONGEST if draw.random() < 0.1 else round(LONGEST ** draw.random())
    kind = draw.choice(["even", "skewed", "whole"])
    times = {
        "even": lambda: draw.uniform(0.5, 1.5),
        "skewed": lambda: draw.lognormvariate(0.0, 2.0),
        "whole": lambda: float(draw.choice([0, 0, 1, 2, 3, 50])),
    }[kind]
    return [times() for _ in range(n)], draw.randint(1, 16)


@dataclass(frozen=True, slots=True)
class Result:
    """How one chain went."""

    n_nodes: int
    exact: bool
    proven: bool
    seconds: float


def solve(times: Sequence[float], n_stages: int) -> Result:
    names = [f"v{i}" for i in range(len(times))]
    nodes = tuple(Node(name, time) for name, time in zip(names, times, strict=True))
    problem = Problem(nodes, tuple(zip(names, names[1:], strict=False)))
    begin = process_time()
    found = partition(problem, n_stages, gap=0)
    seconds = process_time() - begin
    found.verify(problem, n_stages)
    best = best_of_chain(times, n_stages)
    return Result(len(times), abs(found.bottleneck - best) <= 1e-9 * best, found.status == "optimal", seconds)


def rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """One per band of lengths, one for the longest, and one for all."""
    some = [(f"{low} to {high}", [r for r in results if low <= r.n_nodes <= high]) for low, high in BANDS]
    some += [(f"{LONGEST}", [r for r in results if r.n_nodes == LONGEST]), ("all", list(results))]
    return [(name, *summary(part)) for name, part in some if part]


def summary(results: Sequence[Result]) -> tuple[str, ...]:
    count, spent = len(results), sorted(1e3 * r.seconds for r in results)
    times = statistics.median(spent), spent[int(0.99 * (count - 1))], spent[-1]
    good = (str(sum(values)) for values in ([r.exact for r in results], [r.proven for r in results]))
    return (str(count), *good, *(f"{value:.1f}" for value in times))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    parser.add_argument("--chains", type=int, default=10_000)
    arguments = parser.parse_args()
    draw = random.Random("chains")
    results = [solve(*chain(draw)) for _ in range(arguments.chains)]
    table = Table(*HEADER)
    for row in rows(results):
        table.add_row(*row)
    Console().print(table)
    if arguments.markdown:
        lines = ["| " + " | ".join(row) + " |" for row in (HEADER, *rows(results))]
        lines.insert(1, "|" + "---|" * len(HEADER))
        machine = (
            f"Python {platform.python_version()}, {platform.machine()}, written by `benchmarks/partition_chains.py`."
        )
        arguments.markdown.write_text("\n".join(["# Random chains", "", machine, "", *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
