"""Compare cuts chosen by the step with exhaustive search, and free cuts of towers with pinned ones.

    python benchmarks/step_cuts.py [--models 60] [--resume benchmarks/results/step_cuts.jsonl] [--markdown benchmarks/results/step_cuts.md]

Random series-parallel models of 6 to 9 layers, with random costs and links of random speed, on 3 devices with 8 micro-batches.
Exhaustive search simulates every cut that precedence allows, under the one schedule 1f1b ("fixed") or under every schedule of the
catalogue that suits ("open"), in the order of a lower bound, until the bound passes the best. Ours is the cut of
`compile(schedule="1f1b")` and of `compile(schedule="auto")` without the searched schedule: the latter may be shorter than any of
the catalogue. "Bottleneck" is the cut with the least bottleneck. Ratios are to the best. Towers are those of benchmarks/towers.py.
Nothing is measured but the CPU seconds of planning. With `--resume`, models that a file lists are not run again, and each result is
appended to it.
"""

from __future__ import annotations

import argparse
import inspect
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import mean
from time import process_time

import msgspec
import torch
from torch import nn

import pipecompile as pc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.towers import compiled
from pipecompile.batching.call_inputs import flatten
from pipecompile.batching.microbatches import MiniBatch, sizes
from pipecompile.costs import NodeCost
from pipecompile.graph.colocation import compute_nodes, note_ties
from pipecompile.options import Options
from pipecompile.partitioners import Problem
from pipecompile.partitioners.solver import with_cut
from pipecompile.planning.candidate_evaluation import CandidateEvaluator
from pipecompile.planning.cost_table import MeasuredCosts
from pipecompile.planning.draft import make_draft
from pipecompile.planning.joint_search import compared_rows
from pipecompile.planning.planner import make_plan, make_problem
from pipecompile.planning.schedule_choice import make_schedule
from pipecompile.planning.solve_cut import solve_cut
from pipecompile.planning.step_search import step_seconds
from pipecompile.tracing.traced_graph import TracedGraph

DEVICES, MICROBATCHES, WIDTH = 3, 8, 16
CATALOGUE = ("1f1b", "gpipe", "eager-1f1b", "zb-h1", "zb-h2")


class SeriesParallel(nn.Module):
    """A random tree of layers in series and branches side by side, whose results are added."""

    def __init__(self, count: int, draw: random.Random) -> None:
        super().__init__()
        self.is_series = draw.random() < 0.5
        if count == 1:
            self.parts = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        else:
            first = draw.randint(1, count - 1)
            self.parts = nn.ModuleList(SeriesParallel(n, draw) for n in (first, count - first))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_series or len(self.parts) == 1:
            for part in self.parts:
                x = part(x)
            return x
        return self.parts[0](x) + self.parts[1](x)


class Case:
    """A random model with its recording, costs and options."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        model, x = SeriesParallel(draw.randint(6, 9), draw), torch.zeros(2 * MICROBATCHES, WIDTH)
        self.graph: TracedGraph = note_ties(pc.trace(model, x[:2]))
        self.batch = MiniBatch(flatten(model.forward, (x,), {}), sizes(2 * MICROBATCHES, MICROBATCHES))
        self.costs = {node.name: self._cost(node.op == "call_module", draw) for node in compute_nodes(self.graph)}
        table = {2: MeasuredCosts("random", self.costs)}
        bandwidth = draw.choice([1e12, 1e6, 1e5])
        usual = {name: each.default for name, each in inspect.signature(pc.compile).parameters.items()}
        keep = {
            name: value
            for name, value in usual.items()
            if name not in ("model", "n_stages", "example_args", "example_kwargs", "mesh")
        }
        given = {"devices": ["cpu"] * DEVICES, "cost": "analytic", "loss_fn": torch.Tensor.mean, "bandwidth": bandwidth,
                 "n_microbatches": MICROBATCHES, "schedule": "1f1b"}  # fmt: skip
        self.options, self.table = Options.of(model, DEVICES, **(keep | given)), table

    @staticmethod
    def _cost(is_layer: bool, draw: random.Random) -> NodeCost:
        forward = draw.uniform(1e-3, 1e-2) if is_layer else 1e-5
        return NodeCost(forward, 2 * forward, 100, 2 * WIDTH * 4, weight=forward)

    def seconds(self, stage_of: dict[str, int], problem: Problem, names: tuple[str, ...]) -> float:
        """Return the simulated step of a cut under the best of these schedules."""
        first = pc.Partition(stage_of, 0.0, 0.0, "feasible", "dp", 0.0)
        partition = with_cut(first, problem, stage_of, DEVICES)
        draft = make_draft(self.graph, partition, problem, self.costs, self.options, tuple(range(DEVICES)), 2)
        options = [replace(self.options, schedule=name) for name in names]
        rows = [
            (each, make_schedule(each, draft.stages, draft.routes, draft.placement, MICROBATCHES)) for each in options
        ]
        return min(step_seconds(draft, schedule, each) for each, schedule in rows)

    def best(self, names: tuple[str, ...]) -> float:
        """Return the shortest step of all cuts under these schedules."""
        problem = make_problem(self.graph, self.costs, self.options, self.options.schedule_for(MICROBATCHES))
        best = inf
        for bound, stage_of in sorted(
            ((bound_of(problem, cut), cut) for cut in cuts(problem)), key=lambda pair: pair[0]
        ):
            if bound >= best:
                break
            best = min(best, self.seconds(stage_of, problem, names))
        return best

    def least_bottleneck(self, names: tuple[str, ...]) -> float:
        problem = make_problem(self.graph, self.costs, self.options, self.options.schedule_for(MICROBATCHES))
        partition, solved = solve_cut(self.graph, problem, self.options)
        return self.seconds(partition.stage_of, solved, names)

    def fixed(self) -> float:
        step = make_plan(self.graph, self.batch, self.table, self.options).plan.step
        assert step is not None
        return step.seconds

    def open(self) -> float:
        options = replace(self.options, schedule="auto")
        evaluator = CandidateEvaluator(self.graph, options, self.table, 1)
        rows = compared_rows(evaluator, self.graph, [self.batch], self.table, options)
        return min(row.seconds for row in rows if row.draft is not None)


def cuts(problem: Problem) -> Iterator[dict[str, int]]:
    """Yield every cut that precedence allows and that uses all devices."""
    names, before = [node.name for node in problem.nodes], {node.name: [] for node in problem.nodes}
    for a, b in problem.precedence:
        before[b].append(a)
    pending: list[dict[str, int]] = [{}]
    for name in names:
        pending = [{**cut, name: stage} for cut in pending
                   for stage in range(max((cut[a] for a in before[name]), default=0), DEVICES)]  # fmt: skip
    yield from (cut for cut in pending if len(set(cut.values())) == DEVICES)


def bound_of(problem: Problem, cut: dict[str, int]) -> float:
    """Return a lower bound on the step of a cut: a device's work, and the forwards that come before it."""
    work, forward, head = [0.0] * DEVICES, [0.0] * DEVICES, [0.0] * DEVICES
    for node in problem.nodes:
        work[cut[node.name]] += node.time
        forward[cut[node.name]] += node.forward
    for a, b in sorted({(cut[a], cut[b]) for a, b in problem.precedence if cut[a] < cut[b]}):
        head[b] = max(head[b], head[a] + forward[a])
    return max(before + MICROBATCHES * own for before, own in zip(head, work, strict=True)) * (1 - 1e-9)


class Compared(msgspec.Struct, frozen=True):
    """The ratios of one model to the best, and the CPU seconds of planning it twice, under one schedule and under all."""

    seed: int
    ratios: dict[str, float]
    cpu_seconds: float


def compare_model(seed: int) -> Compared:
    case = Case(seed)
    one, every = case.best(CATALOGUE[:1]), case.best(CATALOGUE)
    begin = process_time()
    ratios = {"fixed": case.fixed() / one, "open": case.open() / every}
    planning = process_time() - begin
    ratios |= {
        "fixed, bottleneck": case.least_bottleneck(CATALOGUE[:1]) / one,
        "open, bottleneck": case.least_bottleneck(CATALOGUE) / every,
    }
    return Compared(seed, ratios, planning)


def compare(count: int, resume: Path | None) -> list[tuple[str, ...]]:
    """Return the table of random models."""
    lines = resume.read_bytes().splitlines() if resume and resume.exists() else []
    known = {one.seed: one for one in (msgspec.json.decode(line, type=Compared) for line in lines)}
    for seed in range(count):
        if seed not in known:
            known[seed] = compare_model(seed)
            print(seed, *(f"{name} {value:.4f}" for name, value in known[seed].ratios.items()), flush=True)
            if resume:
                with resume.open("ab") as results:
                    results.write(msgspec.json.encode(known[seed]) + b"\n")
    models = [known[seed] for seed in range(count)]
    print(f"planning took {mean(model.cpu_seconds for model in models):.2f} CPU s a model")
    columns = {name: [model.ratios[name] for model in models] for name in models[0].ratios}
    return [(name, f"{mean(values):.4f}", f"{max(values):.4f}", str(sum(value > 1.02 for value in values)))
            for name, values in columns.items()]  # fmt: skip


def towers() -> list[tuple[str, ...]]:
    """Return the table of towers: milliseconds of a step."""
    rows = []
    for count in range(2, 9):
        free, pinned = (compiled(count, pinned=pinned) for pinned in (False, True))
        step = free.plan.step
        least, bound = (step.first_seconds, step.lower_bound) if step else (free.simulate().makespan, 0.0)
        ours, by_hand = free.simulate().makespan, pinned.simulate().makespan
        rows.append(
            (str(count), *(f"{1e3 * value:.3f}" for value in (least, ours, by_hand, bound)), f"{ours / by_hand:.3f}")
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=int, default=60, help="number of random models")
    parser.add_argument("--markdown", type=Path, help="also write the tables here")
    parser.add_argument("--resume", type=Path, help="file of results, one JSON object a line")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    lines = ["# Cuts by the step", ""]
    command = f"python benchmarks/step_cuts.py --models {arguments.models} --markdown benchmarks/results/step_cuts.md"
    lines += [
        f"Simulated, written by `{command}`.",
        "",
        f"{arguments.models} random series-parallel models, ratio to exhaustive search:",
        "",
    ]
    lines += _table(("schedule, cut", "mean", "largest", "above 1.02"), compare(arguments.models, arguments.resume))
    lines += ["", "Towers and a head, one device each, 4 micro-batches per device, in ms:", ""]
    lines += _table(("towers", "least bottleneck", "ours", "pinned", "bound", "ours / pinned"), towers())
    print("\n".join(lines))
    if arguments.markdown:
        arguments.markdown.write_text("\n".join([*lines, ""]), encoding="utf-8")


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" if cells else "|" + "---|" * len(header) for cells in (header, (), *rows)]


if __name__ == "__main__":
    main()
