"""Both methods of `pc.partition` on the reference problems, beside the published optima.

    python benchmarks/partition.py [--markdown benchmarks/results/partition.md] [--only resnet] [--stages 2 3 4]

A ratio is our bottleneck over the published optimum: 1.000000 is optimal. `dp` and `auto` use the exact lattice of down-sets
where it is small; `ilp` does without it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pipecompile.errors import InfeasibleError
from pipecompile.partitioners import Partition, Problem, partition

REFERENCE = Path(__file__).parent.parent / "tests" / "partitioners" / "reference"
METHODS = ("dp", "ilp", "auto")
HEADER = ("instance", "K", "published", *(f"{m} {part}" for m in METHODS for part in ("ratio", "status", "s")))


@dataclass(frozen=True, slots=True)
class Row:
    """One instance cut into one number of stages, by every method. None stands for "proven infeasible"."""

    name: str
    n_stages: int
    published: float | None
    found: tuple[Partition | None, ...]

    def cells(self) -> list[str]:
        published = "none fits" if self.published is None else f"{self.published:.6f}"
        return [
            self.name,
            str(self.n_stages),
            published,
            *(cell for found in self.found for cell in self._cells(found)),
        ]

    def _cells(self, found: Partition | None) -> tuple[str, str, str]:
        if found is None or self.published is None:
            return "", "infeasible" if found is None else f"WRONG: {found.bottleneck:g}", ""
        return f"{found.bottleneck / self.published:.6f}", f"{found.status} ({found.method})", f"{found.seconds:.2f}"


def solve(problem: Problem, n_stages: int, method: str, time_limit: float) -> Partition | None:
    try:
        found = partition(problem, n_stages, method=method, time_limit=time_limit, gap=0)
    except InfeasibleError:
        return None
    found.verify(problem, n_stages)
    return found


def summary(rows: list[Row]) -> list[str]:
    lines = []
    for number, method in enumerate(METHODS):
        cases = [(row.published, row.found[number]) for row in rows]
        hit = sum(found is None if best is None else found is not None and abs(found.bottleneck / best - 1) <= 1e-6
                  for best, found in cases)  # fmt: skip
        proven = sum(found is None or found.status == "optimal" for _, found in cases)
        seconds = sorted(found.seconds for _, found in cases if found) or [0.0]
        lines.append(f"{method}: {hit} of {len(rows)} as published, {proven} proven; "
                     f"median {statistics.median(seconds):.2f} s, worst {seconds[-1]:.2f} s")  # fmt: skip
    return lines


def markdown(rows: list[Row]) -> str:
    table = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    table += ["| " + " | ".join(row.cells()) + " |" for row in rows]
    machine = f"Python {platform.python_version()}, {platform.machine()}, written by `benchmarks/partition.py`."
    return "\n".join(["# Partitioning the reference problems", "", machine, "", *(f"- {line}" for line in summary(rows)), "", *table, ""])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    parser.add_argument("--only", default="", help="part of the instances' names")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--time-limit", type=float, default=60.0)
    arguments = parser.parse_args()
    rows = []
    for path in sorted(path for path in REFERENCE.glob("*.json") if arguments.only in path.stem):
        problem, published = Problem.load(path), json.loads(path.read_bytes())["optima"]
        for n_stages in arguments.stages:
            found = tuple(solve(problem, n_stages, method, arguments.time_limit) for method in METHODS)
            rows.append(Row(path.stem, n_stages, published[str(n_stages)], found))
    table = Table(*HEADER)
    for row in rows:
        table.add_row(*row.cells())
    console = Console(width=160)
    console.print(table)
    console.print(*summary(rows), sep="\n")
    if arguments.markdown:
        arguments.markdown.parent.mkdir(parents=True, exist_ok=True)
        arguments.markdown.write_text(markdown(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
