"""Stage times as the plan predicts them against those of a step, and the slowest stage beside that of other cuts.

    python benchmarks/cost_accuracy.py [--only U-Net] [--cpu-time] [--markdown benchmarks/results/cost_accuracy.md]

One thread, inline, so that stages do not disturb each other; 1F1B, four micro-batches. On a machine that is not idle,
`--cpu-time` predicts and measures CPU time of that thread instead. (a) Every stage's forward and backward:
the median over micro-batches and steps, against the profiled costs of its nodes. (b) The slowest stage, forward and
backward, of our cut and of three others on the same profile: "chain" balances the measured times along the order of the calls, as
torchgpipe does for a Sequential, exactly; "parameters" and "layers" give every stage as many of them. The cuts take turns;
a ratio is the median over the rounds, of their slowest stage over ours in the same round.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from time import thread_time

import torch
from partition_models import CUTS, cuts
from rich.console import Console
from rich.table import Table
from trained import SUBJECTS, Subject

import pipecompile as pc
from pipecompile.costs import profile
from pipecompile.graph.stages import routes
from pipecompile.runtime import interpreter

MODELS = ("ResNet-101, 64 px", "U-Net, depth 5", "ViT-small, 96 px", "GPT-2, 6 layers")

Times = dict[str, float]
"""Median seconds of every stage's forward and backward in one step: "0F", "0B" ..."""


@dataclass(frozen=True, slots=True)
class Result:
    """One model in one number of stages: predictions, and per cut what the rounds measured, ours first."""

    predicted: Times
    rounds: tuple[tuple[Times, ...], ...]

    @property
    def ratios(self) -> list[float]:
        """Measured over predicted, per stage and direction."""
        return [median(times[0][key] for times in self.rounds) / seconds for key, seconds in self.predicted.items()]

    def beside(self, other: int) -> list[float]:
        return sorted(slowest(times[other]) / slowest(times[0]) for times in self.rounds)


def slowest(times: Times) -> float:
    """Forward and backward of the slowest stage."""
    return max(seconds + times[key.replace("F", "B")] for key, seconds in times.items() if key.endswith("F"))


def one_step(subject: Subject, pipe: pc.Pipeline) -> Times:
    subject.step(pipe)
    assert pipe.measured is not None
    found: dict[str, list[float]] = {}
    for span in pipe.measured.spans:
        key = span.name.rstrip("0123456789")
        found.setdefault(key, []).append(span.end - span.start)
    return {key: median(seconds) for key, seconds in found.items()}


def with_cut(subject: Subject, ours: pc.Pipeline, stage_of: dict[str, int]) -> pc.Pipeline:
    plan = replace(ours.plan, stage_of=stage_of, routes=routes(ours.graph, stage_of))
    return subject.compile(plan.n_stages, dispatch="inline", plan=plan)


def measured(subject: Subject, n_stages: int, rounds: int) -> Result:
    ours = subject.compile(n_stages, dispatch="inline")
    problem = ours.problem
    assert problem is not None
    graph = ours.graph
    modules = {n.name: graph.get_submodule(str(n.target)) for n in graph.graph.nodes if n.op == "call_module"}
    parameters = {name: sum(p.numel() for p in module.parameters()) for name, module in modules.items()}
    pipes = [ours, *(with_cut(subject, ours, cut) for cut in cuts(problem, parameters, n_stages))]
    for pipe in pipes:
        subject.step(pipe)
    found = tuple(tuple(one_step(subject, pipe) for pipe in pipes) for _ in range(rounds))
    predicted = {f"{s.stage}F": s.forward for s in ours.plan.stages} | {
        f"{s.stage}B": s.backward for s in ours.plan.stages
    }
    return Result(predicted, found)


def tables(results: dict[tuple[str, int], Result]) -> list[Table]:
    first = Table("", "K", "measured / predicted, stage by stage (F B)", "median error", title="(a) Stage times")
    second = Table(
        "", "K", "slowest stage, ms", *CUTS, title="(b) The slowest stage of other cuts over ours, middle half"
    )
    for (name, n_stages), result in results.items():
        ratios = result.ratios
        pairs = "  ".join(f"{f:.2f} {b:.2f}" for f, b in zip(ratios[:n_stages], ratios[n_stages:], strict=True))
        error = median(abs(1 / ratio - 1) for ratio in ratios)
        first.add_row(name, str(n_stages), pairs, f"{error:.1%}")
        ours = median(slowest(times[0]) for times in result.rounds)
        beside = (quantiles(result.beside(other), n=4) for other in range(1, 1 + len(CUTS)))
        second.add_row(
            name, str(n_stages), f"{1e3 * ours:.1f}", *(f"{m:.2f} ({a:.2f} to {b:.2f})" for a, m, b in beside)
        )
    return [first, second]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the models' names")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="on a machine that is not idle")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(arguments)
    if options.cpu_time:
        profile.perf_counter = interpreter.perf_counter = thread_time
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = {}
    for name in MODELS:
        if options.only in name:
            subject = SUBJECTS[name]()
            for n_stages in options.stages:
                results[name, n_stages] = measured(subject, n_stages, options.rounds)
                print(name, n_stages, *(f"{ratio:.2f}" for ratio in results[name, n_stages].ratios), flush=True)
    console = Console(record=True, width=130)
    for table in tables(results):
        console.print(table)
    if options.markdown:
        command = f"python benchmarks/cost_accuracy.py{' --cpu-time' * options.cpu_time}"
        head = f"# Stage times\n\n`{command}`, torch {torch.__version__}, {os.cpu_count()} cores.\n"
        options.markdown.write_text(f"{head}\n```\n{console.export_text()}```\n")


if __name__ == "__main__":
    main()
