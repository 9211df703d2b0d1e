"""Graphs of 20,000 nodes cut into 16 stages: how far from the best, and after how long.

    python benchmarks/partition_scale.py [--nodes 20000] [--stages 16] [--markdown benchmarks/results/partition_scale.md]

Stacked transformer blocks as operators, cells of a search, and random graphs whose nodes read a few of those before them, each
with cheap and with even tensors, for training (a gradient for every tensor).
"""

from __future__ import annotations

import argparse
import platform
import random
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from partition_family import TENSORS, Sketch
from rich.console import Console
from rich.table import Table

from pipecompile.partitioners import Problem, partition

HEADER = ("graph", "tensors", "nodes", "arcs", "K", "gap", "status", "seconds")


def stacked(draw: random.Random, n_nodes: int) -> Sketch:
    """Blocks of attention and of two large layers; a mask that all of them read."""
    net = Sketch(draw)
    mask, x = net.op(time=0.01, size=0.1), net.op(time=0.3)
    while len(net.times) < n_nodes:
        query, key, value = (net.chain(x, 2.0, 0.05, 0.1) for _ in range(3))
        scores = net.op(net.op(query, key, size=4.0), mask, time=0.5, size=4.0)
        x = net.op(x, net.chain(net.op(scores, value), 0.1, 2.0), time=0.1)
        x = net.op(x, net.chain(x, 0.15, 7.0, 0.4, 7.0, size=2.0), time=0.1)
    return net


def searched(draw: random.Random, n_nodes: int) -> Sketch:
    """Cells that each join random operations on the two cells before."""
    net = Sketch(draw)
    before, x = net.op(), net.op()
    while len(net.times) < n_nodes:
        states = [before, x]
        for _ in range(4):
            ways = [net.chain(draw.choice(states), *([1.0, 0.2] * draw.randint(1, 2)), size=0.25) for _ in range(2)]
            states.append(net.op(*ways, time=0.1, size=0.25))
        before, x = x, net.op(*states[2:], time=0.1)
    return net


def scattered(draw: random.Random, n_nodes: int) -> Sketch:
    """Every node reads up to three of those before it, mostly near ones."""
    net = Sketch(draw)
    net.op()
    for v in range(1, n_nodes):
        net.op(*{max(0, v - 1 - int(draw.expovariate(1 / 8))) for _ in range(draw.randint(1, 3))})
    return net


SHAPES: tuple[Callable[[random.Random, int], Sketch], ...] = (stacked, searched, scattered)


def large(shape: Callable[[random.Random, int], Sketch], n_nodes: int, tensors: str) -> Problem:
    """One problem; `tensors` is "cheap", "even" or "dear"."""
    sketch = shape(random.Random(shape.__name__), n_nodes)
    return sketch.problem(shape.__name__, tensor=TENSORS[tensors], training=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--stages", type=int, default=16)
    parser.add_argument("--time-limit", type=float, default=30.0)
    arguments = parser.parse_args()
    rows = []
    for shape in SHAPES:
        for tensors in ("cheap", "even"):
            problem, begin = large(shape, arguments.nodes, tensors), perf_counter()
            found = partition(problem, arguments.stages, time_limit=arguments.time_limit)
            seconds = perf_counter() - begin
            found.verify(problem, arguments.stages)
            rows.append((shape.__name__, tensors, str(len(problem.nodes)), str(len(problem.precedence)),
                         str(arguments.stages), f"{found.gap:.2%}", found.status, f"{seconds:.1f}"))  # fmt: skip
    table = Table(*HEADER)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if arguments.markdown:
        lines = ["| " + " | ".join(row) + " |" for row in (HEADER, *rows)]
        lines.insert(1, "|" + "---|" * len(HEADER))
        machine = (f"Python {platform.python_version()}, {platform.machine()}, time_limit={arguments.time_limit:g}, "
                   "written by `benchmarks/partition_scale.py`.")  # fmt: skip
        arguments.markdown.write_text("\n".join(["# Large graphs", "", machine, "", *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
