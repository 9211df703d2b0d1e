"""Random computation graphs cut into 2 to 64 stages: how near the proven bound is to the best cut.

    python benchmarks/partition_random.py [--graphs 40] [--stages 2 4 8 16 32 64] [--time-limit 60]
        [--resume benchmarks/results/partition_random.jsonl] [--markdown benchmarks/results/partition_random.md]

1,000 instances, seeds 0 to 999, of the kind of the test set of REGAL (arXiv 1905.02494): 50 to 200 operations; the undirected graph
is Erdos-Renyi, Barabasi-Albert, Watts-Strogatz or a stochastic block model, and every edge leads from the earlier to the later
operation of a random order. A tensor per operation has a size of N(50, 10); an operation takes the sum of what it reads and writes,
times a factor from 0.5 to 1.5; a device sends a tensor once and receives it once, at a tenth of its size. The first `--graphs`
seeds are solved. With `--resume`, what a file lists is not solved again, and each result is appended to it. "bound / best" is the
geometric mean, as in Archer et al., "Practical Performance Guarantees for Pipelined DNN Inference", ICML 2024 (0.945 for k = 16, on
graphs of other numbers); "simple / best" is that of the larger of even share and largest operation.
"""

from __future__ import annotations

import argparse
import platform
import random
from math import exp, log
from pathlib import Path
from time import process_time

import msgspec
import networkx as nx
from rich.console import Console
from rich.table import Table

from pipecompile.partitioners import Node, Problem, Tensor, partition

N_GRAPHS = 1000
HEADER = ("k", "graphs", "bound / best", "least", "proven", "within 0.1 %", "simple / best", "median s",
          "median CPU s")  # fmt: skip


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


class Solved(msgspec.Struct, frozen=True):
    """One instance, cut into one number of stages. `simple` is the larger of even share and largest operation."""

    seed: int
    n_stages: int
    time_limit: float
    bottleneck: float
    lower_bound: float
    simple: float
    proven: bool
    seconds: float
    cpu_seconds: float

    @property
    def ratio(self) -> float:
        return self.lower_bound / self.bottleneck


def solve(seed: int, n_stages: int, time_limit: float) -> Solved:
    problem, begin = random_graph(seed), process_time()
    found = partition(problem, n_stages, time_limit=time_limit)
    cpu_seconds = process_time() - begin
    found.verify(problem, n_stages)
    times = [node.time for node in problem.nodes]
    return Solved(seed, n_stages, time_limit, found.bottleneck, found.lower_bound, max(sum(times) / n_stages, *times),
                  found.status == "optimal", found.seconds, cpu_seconds)  # fmt: skip


def known(path: Path | None) -> list[Solved]:
    """Return the results that a file lists."""
    if path is None or not path.exists():
        return []
    return [msgspec.json.decode(line, type=Solved) for line in path.read_bytes().splitlines() if line]


def row(solved: list[Solved]) -> tuple[str, ...]:
    ratios, seconds = [one.ratio for one in solved], sorted(one.seconds for one in solved)
    proven = sum(one.proven for one in solved)
    near = sum(one.ratio >= 0.999 for one in solved)
    return (str(solved[0].n_stages), str(len(solved)), f"{_mean(ratios):.4f}", f"{min(ratios):.4f}", str(proven), str(near),
            f"{_mean([one.simple / one.bottleneck for one in solved]):.4f}", f"{seconds[len(seconds) // 2]:.1f}",
            f"{sorted(one.cpu_seconds for one in solved)[len(solved) // 2]:.1f}")  # fmt: skip


def _mean(ratios: list[float]) -> float:
    """Return the geometric mean."""
    return exp(sum(map(log, ratios)) / len(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    parser.add_argument("--graphs", type=int, default=40, help="the first so many of the seeds")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--resume", type=Path, help="file of results, one JSON object a line")
    parser.add_argument(
        "--known", action="store_true", help="the table of what the file of results lists: solve nothing"
    )
    arguments = parser.parse_args()
    seeds, rows = range(min(arguments.graphs, N_GRAPHS)), []
    done = {(one.seed, one.n_stages): one for one in known(arguments.resume) if one.time_limit == arguments.time_limit}
    asked = {count for _, count in done} if arguments.known else set(arguments.stages)
    for n_stages in sorted(asked):
        for seed in seeds:
            if (seed, n_stages) not in done and not arguments.known:
                done[seed, n_stages] = solve(seed, n_stages, arguments.time_limit)
                if arguments.resume:
                    with arguments.resume.open("ab") as results:
                        results.write(msgspec.json.encode(done[seed, n_stages]) + b"\n")
        rows.append(row([done[seed, n_stages] for seed in seeds if (seed, n_stages) in done]))
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
        machine = (f"Python {platform.python_version()}, {platform.machine()}, the first of seeds 0 to {len(seeds) - 1}, "
                   f"written by `{command}`. CPU seconds are far below the seconds where the machine was shared.")  # fmt: skip
        arguments.markdown.write_text("\n".join(["# Random graphs", "", machine, "", *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
