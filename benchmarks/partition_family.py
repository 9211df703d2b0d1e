"""Generated problems of the family that the reference problems belong to: how long `pc.partition` takes, and what it leaves unproven.

    python benchmarks/partition_family.py [--markdown benchmarks/results/partition_family.md] [--seeds 3] [--only inception]

Layer and operator graphs of residual, inception, transformer and recurrent networks, 30 to 450 nodes, for inference and
for training (a gradient for every tensor), with cheap, even and dear tensors, memory loose and tight, in 2 to 8 stages.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

from pipecompile.errors import InfeasibleError
from pipecompile.partitioners import Node, Problem, Tensor, partition

HEADER = ("shape", "nodes", "tensors", "memory", "problems", "none fits", "median s", "worst s", "proven", "worst gap")
TENSORS = {"cheap": 0.02, "even": 0.4, "dear": 3.0}
"""Time to move a tensor of the mean size, as a multiple of the time of the mean node."""


@dataclass(slots=True)
class Sketch:
    """A network in the making: nodes with a weight in time and in memory, each reading some earlier ones."""

    draw: random.Random
    times: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    reads: list[tuple[int, ...]] = field(default_factory=list)

    def op(self, *reads: int, time: float = 1.0, held: float = 0.0, size: float = 1.0) -> int:
        """One operation. Sizes are those of what it gives."""
        self.times.append(time * self.draw.lognormvariate(0.0, 0.4))
        self.held.append(held * self.draw.lognormvariate(0.0, 0.4))
        self.sizes.append(size * self.draw.lognormvariate(0.0, 0.1))
        self.reads.append(tuple(dict.fromkeys(reads)))
        return len(self.times) - 1

    def chain(self, x: int, *times: float, size: float = 1.0, held: float = 1.0) -> int:
        for time in times:
            x = self.op(x, time=time, size=size, held=held if time > 0.5 else 0.0)
        return x

    def problem(self, name: str, *, tensor: float, training: bool) -> Problem:
        """With times of one micro-batch. In training every tensor has a gradient that goes the other way."""
        names = [f"n{i}" for i in range(len(self.times))]
        readers: list[list[str]] = [[] for _ in names]
        for number, reads in enumerate(self.reads):
            for source in reads:
                readers[source].append(names[number])
        unit = tensor * statistics.mean(self.times) / statistics.mean(self.sizes)
        times = [size * unit for size in self.sizes]
        tensors = [Tensor(names[v], tuple(users), times[v]) for v, users in enumerate(readers) if users]
        if training:
            tensors += [Tensor(names[v], (names[u],), times[u]) for v, reads in enumerate(self.reads) for u in reads]
        passes = 3.0 if training else 1.0
        nodes = [
            Node(n, t * passes, h * (4.0 if training else 1.0))
            for n, t, h in zip(names, self.times, self.held, strict=True)
        ]
        arcs = tuple((names[u], names[v]) for v, reads in enumerate(self.reads) for u in reads)
        return Problem(tuple(nodes), arcs, tuple(tensors), name=name)


# -- shapes -----------------------------------------------------------------------------------------------------------


def residual(draw: random.Random) -> Sketch:
    """Blocks of convolution, norm and activation around which the input goes along."""
    net = Sketch(draw)
    x = net.chain(net.op(size=2.0), 2.0, 0.2, 0.1, size=4.0)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        size = 4.0 / 2**stage
        for block in range(blocks):
            way = net.chain(x, 1.0, 0.2, 0.1, 2.0, 0.2, 0.1, 1.0, 0.2, size=size, held=4.0**stage)
            skip = net.chain(x, 0.8, 0.2, size=size, held=4.0**stage) if block == 0 else x
            x = net.op(net.op(way, skip, time=0.1, size=size), time=0.1, size=size)
    net.op(net.op(x, time=0.1, size=0.1), time=1.0, held=30.0)
    return net


def inception(draw: random.Random) -> Sketch:
    """Modules of four branches that are put together again."""
    net = Sketch(draw)
    x = net.chain(net.op(size=2.0), 1.0, 0.1, 0.1, 2.0, 0.1, 0.1, size=3.0)
    for _ in range(draw.randint(6, 15)):
        ends = [
            net.chain(x, *[t for _ in range(depth) for t in (1.0, 0.15, 0.1)], size=draw.choice([0.3, 0.5, 1.0]))
            for depth in (1, 2, draw.randint(2, 4))
        ]
        ends.append(net.chain(net.op(x, time=0.2), 0.6, 0.15, 0.1, size=0.5))
        x = net.op(*ends, time=0.1, size=2.0)
    net.op(net.op(x, time=0.1, size=0.1), time=0.5, held=10.0)
    return net


def transformer_layers(draw: random.Random) -> Sketch:
    """Whole layers, and a mask that all of them read."""
    net = Sketch(draw)
    mask, x = net.op(time=0.01, size=0.1), net.op(time=0.5, held=30.0)
    for _ in range(24):
        x = net.op(x, mask, time=5.0, held=10.0)
    net.chain(x, 0.5, 5.0, 0.2, held=30.0)
    return net


def transformer_operators(draw: random.Random) -> Sketch:
    """Query, key and value branches, softmax, residual sums; weights and constants are nodes of their own."""
    net = Sketch(draw)
    mask = net.op(net.op(time=0.01, size=0.05), time=0.01, size=0.5)
    x = net.op(net.op(time=0.01, held=30.0, size=60.0), time=0.3)
    for _ in range(draw.randint(3, 15)):
        heads = []
        for _ in range(3):
            weight = net.op(time=0.0, held=3.0, size=1.5)
            heads.append(net.chain(net.op(x, weight, time=2.0), 0.05, 0.1, 0.1))
        scores = net.op(
            net.op(net.op(heads[0], heads[1], time=1.0, size=4.0), mask, time=0.3, size=4.0), time=0.5, size=4.0
        )
        mixed = net.chain(net.op(scores, heads[2], time=1.0), 0.1, 0.05)
        x = net.chain(net.op(x, net.op(mixed, net.op(time=0.0, held=3.0, size=1.5), time=2.0), time=0.1), 0.1, 0.15)
        inner = net.op(x, net.op(time=0.0, held=12.0, size=6.0), time=7.0, size=4.0)
        inner = net.chain(inner, 0.2, 0.4, 0.2, size=4.0)
        x = net.chain(net.op(x, net.op(inner, net.op(time=0.0, held=12.0, size=6.0), time=7.0), time=0.1), 0.1, 0.15)
    net.op(x, time=4.0, held=30.0)
    return net


def recurrent(draw: random.Random) -> Sketch:
    """Encoder and decoder with attention: all of the decoder reads the encoder's end; many nodes cost nothing."""
    net = Sketch(draw)
    x = [net.op(time=0.0, size=0.5) for _ in range(4)]
    top = net.op(*x[:2], time=1.0, held=20.0)
    for _ in range(8):
        top = net.op(net.op(net.op(top, time=15.0, held=8.0), time=0.0), x[2], time=0.0)
    state = net.op(x[3], time=1.0, held=20.0)
    context = net.op(net.op(state, time=15.0, held=8.0), top, time=3.0)
    for _ in range(8):
        state = net.op(net.op(state, context, time=0.0), time=18.0, held=8.0)
        state = net.op(net.op(state, time=0.0), *[net.op(time=0.0, size=0.2) for _ in range(2)], time=0.0)
    net.chain(state, 20.0, 1.0, held=30.0)
    return net


def cells(draw: random.Random) -> Sketch:
    """Cells as a search finds them: each joins random operations on the two cells before."""
    net = Sketch(draw)
    before, x = net.op(), net.op(net.op())
    for _ in range(draw.randint(5, 14)):
        states = [before, x]
        for _ in range(4):
            ways = [net.chain(draw.choice(states), *([1.0, 0.2] * draw.randint(1, 2)), size=0.25) for _ in range(2)]
            states.append(net.op(*ways, time=0.1, size=0.25))
        before, x = x, net.op(*states[2:], time=0.1, size=1.0)
    return net


SHAPES: dict[str, Callable[[random.Random], Sketch]] = {
    shape.__name__: shape
    for shape in (residual, inception, transformer_layers, transformer_operators, recurrent, cells)
}


# -- problems ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """One problem, and the number of stages it is cut into."""

    shape: str
    tensors: str
    memory: str
    problem: Problem
    n_stages: int


def cases(seeds: int, only: Sequence[str] = ("",)) -> Iterator[Case]:
    for name, shape in SHAPES.items():
        for tensors, scale in TENSORS.items():
            for seed in range(seeds):
                for training in (False, True):
                    where = f"{name} {tensors} {'training' if training else 'inference'} {seed}"
                    if not any(part in where for part in only):
                        continue
                    sketch = shape(random.Random(f"{name} {seed}"))
                    problem = sketch.problem(where, tensor=scale, training=training)
                    for n_stages in range(2, 9):
                        yield Case(name, tensors, "loose", problem, n_stages)
                        yield Case(name, tensors, "tight", tightened(problem, n_stages), n_stages)


def tightened(problem: Problem, n_stages: int) -> Problem:
    """With room for hardly more than an even share."""
    held = [node.bytes for node in problem.nodes]
    return Problem(problem.nodes, problem.precedence, problem.tensors, name=problem.name,
                   memory_limit=max(1.15 * sum(held) / n_stages, *held))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """How a case went; `gap` is None when it is proven that nothing fits."""

    case: Case
    seconds: float
    gap: float | None


def solve(case: Case, method: str, time_limit: float) -> Result:
    begin = perf_counter()
    try:
        found = partition(case.problem, case.n_stages, method=method, time_limit=time_limit, gap=0)
    except InfeasibleError:
        return Result(case, perf_counter() - begin, None)
    seconds = perf_counter() - begin
    found.verify(case.problem, case.n_stages)
    return Result(case, seconds, 0.0 if found.status == "optimal" else found.gap)


def rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """One per shape, price of tensors and memory, and one for all."""
    keys = list(dict.fromkeys((r.case.shape, r.case.tensors, r.case.memory) for r in results))
    table = []
    for key in keys:
        some = [r for r in results if (r.case.shape, r.case.tensors, r.case.memory) == key]
        sizes = [len(r.case.problem.nodes) for r in some]
        table.append((key[0], f"{min(sizes)} to {max(sizes)}", *key[1:], *summary(some)))
    return [*table, ("all", "", "", "", *summary(results))]


def summary(results: Sequence[Result]) -> tuple[str, ...]:
    seconds, gaps = [r.seconds for r in results], [r.gap for r in results if r.gap is not None]
    proven = sum(not r.gap for r in results)
    return (str(len(results)), str(len(results) - len(gaps)), f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}",
            f"{proven} of {len(results)}", f"{max(gaps, default=0.0):.2%}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the problems' names")
    parser.add_argument("--seeds", type=int, default=3, help="networks of every shape")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--time-limit", type=float, default=30.0)
    parser.add_argument("--slow", type=float, default=5.0, help="print cases that take longer")
    arguments = parser.parse_args()
    console, results = Console(width=150), []
    for case in cases(arguments.seeds, arguments.only):
        result = solve(case, arguments.method, arguments.time_limit)
        results.append(result)
        if result.seconds > arguments.slow:
            gap = "none fits" if result.gap is None else f"gap {result.gap:.3%}"
            console.print(f"{case.problem.name}, {case.memory}, K = {case.n_stages}: {result.seconds:.1f} s, {gap}")
    table = Table(*HEADER)
    for row in rows(results):
        table.add_row(*row)
    console.print(table)
    if arguments.markdown:
        lines = ["| " + " | ".join(row) + " |" for row in (HEADER, *rows(results))]
        lines.insert(1, "|" + "---|" * len(HEADER))
        named = f", only {', '.join(arguments.only)}" if any(arguments.only) else ""
        machine = (
            f"Python {platform.python_version()}, {platform.machine()}, {arguments.seeds} networks of every shape, "
            f"time_limit={arguments.time_limit:g}{named}, written by `benchmarks/partition_family.py`."
        )
        arguments.markdown.parent.mkdir(parents=True, exist_ok=True)
        arguments.markdown.write_text(
            "\n".join(["# Partitioning generated problems", "", machine, "", *lines, ""]), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
