"""Random computation graphs cut into 2 to 64 stages: how near the proven bound is to the best cut.

    python benchmarks/partition_random.py [--graphs 40] [--stages 2 4 8 16 32 64] [--time-limit 60]
        [--markdown benchmarks/results/partition_random.md]

1,000 instances, seeds 0 to 999, of the kind of the test set of REGAL (arXiv 1905.02494): 50 to 200 operations; the undirected graph is
Erdos-Renyi, Barabasi-Albert, Watts-Strogatz or a stochastic block model, and every edge leads from the earlier to the later operation
of a random order. A tensor per operation has a size of N(50, 10); an operation takes the sum of what it reads and writes, times a
factor from 0.5 to 1.5; a device sends a tensor once and receives it once, at a tenth of its size. The first `--graphs` seeds are
solved. "bound / best" is the geometric mean, as in Archer et al., "Practical Performance Guarantees for Pipelined DNN Inference",
ICML 2024 (0.945 for k = 16, on graphs of other numbers); "simple / best" is that of the larger of even share and largest operation.
"""

from __future__ import annotations

import argparse
import platform
import random
from dataclasses import dataclass
from math import exp, log
from pathlib import Path

import networkx as nx
from rich.console import Console
from rich.table import Table

from pipecompile.partitioners import Node, Partition, Problem, Tensor, partition

N_GRAPHS = 1000
HEADER = ("k", "graphs", "bound / best", "least", "proven", "within 0.1 %", "simple / best", "median s")


def random_graph(seed: int) -> Problem:
    """Return the instance of a seed."""
    draw = random.Random(f"random graph {seed}")
    n = draw.randint(50, 200)
    graph = _undirected(draw, n)
    place = list(range(n))
    draw.shuffle(place)
    arcs = sorted({tuple(sorted((place[a], place[b]))) for a, b in graph.edges if a != b})
    size = [max(1.0, draw.gauss(50, 10)) for _ in range(n)]
    reads: list[list[int]] = [[] for _ in range(n)]
    users: list[list[int]] = [[] for _ in range(n)]
    for a, b in arcs:
        reads[b].append(a)
        users[a].append(b)
    time = [draw.uniform(0.5, 1.5) * (size[v] + sum(size[u] for u in reads[v])) for v in range(n)]
    return Problem(
        nodes=tuple(Node(f"v{v}", time[v]) for v in range(n)),
        precedence=tuple((f"v{a}", f"v{b}") for a, b in arcs),
        tensors=tuple(Tensor(f"v{v}", tuple(f"v{u}" for u in users[v]), size[v] / 10) for v in range(n) if users[v]),
        name=f"random graph {seed}",
    )


def _undirected(draw: random.Random, n: int) -> nx.Graph:
    kind, seed = draw.randrange(4), draw.randrange(2**30)
    if kind == 0:
        return nx.fast_gnp_random_graph(n, 3.0 / n, seed)
    if kind == 1:
        return nx.barabasi_albert_graph(n, 2, seed)
    if kind == 2:
        return nx.watts_strogatz_graph(n, 4, 0.3, seed)
    blocks = [n // 4, n // 4, n // 4, n - 3 * (n // 4)]
    inside, between = 10.0 / n, 0.6 / n
    rates = [[inside if a == b else between for b in range(4)] for a in range(4)]
    return nx.stochastic_block_model(blocks, rates, seed=seed)


@dataclass(frozen=True, slots=True)
class Solved:
    """One instance, cut into one number of stages."""

    problem: Problem
    n_stages: int
    found: Partition

    @property
    def simple(self) -> float:
        times = [node.time for node in self.problem.nodes]
        return max(sum(times) / self.n_stages, *times) / self.found.bottleneck

    @property
    def ratio(self) -> float:
        return self.found.lower_bound / self.found.bottleneck


def row(solved: list[Solved]) -> tuple[str, ...]:
    ratios, seconds = [one.ratio for one in solved], sorted(one.found.seconds for one in solved)
    proven = sum(one.found.status == "optimal" for one in solved)
    near = sum(one.found.gap <= 0.001 for one in solved)
    return (str(solved[0].n_stages), str(len(solved)), f"{_mean(ratios):.4f}", f"{min(ratios):.4f}", str(proven), str(near),
            f"{_mean([one.simple for one in solved]):.4f}", f"{seconds[len(seconds) // 2]:.1f}")  # fmt: skip


def _mean(ratios: list[float]) -> float:
    """Return the geometric mean."""
    return exp(sum(map(log, ratios)) / len(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    parser.add_argument("--graphs", type=int, default=40, help="the first so many of the seeds")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--time-limit", type=float, default=60.0)
    arguments = parser.parse_args()
    problems, rows = [random_graph(seed) for seed in range(min(arguments.graphs, N_GRAPHS))], []
    for n_stages in arguments.stages:
        solved = []
        for problem in problems:
            found = partition(problem, n_stages, time_limit=arguments.time_limit)
            found.verify(problem, n_stages)
            solved.append(Solved(problem, n_stages, found))
        rows.append(row(solved))
        print(*rows[-1], sep="  ", flush=True)
    table = Table(*HEADER)
    for cells in rows:
        table.add_row(*cells)
    Console(width=120).print(table)
    if arguments.markdown:
        lines = ["| " + " | ".join(cells) + " |" for cells in (HEADER, *rows)]
        lines.insert(1, "|" + "---|" * len(HEADER))
        command = (
            f"python benchmarks/partition_random.py --graphs {arguments.graphs} --time-limit {arguments.time_limit:g}"
        )
        machine = f"Python {platform.python_version()}, {platform.machine()}, seeds 0 to {len(problems) - 1}, written by `{command}`."
        arguments.markdown.write_text("\n".join(["# Random graphs", "", machine, "", *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
