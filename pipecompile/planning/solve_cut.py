"""The cut of a traced graph: solve the partition problem, keep the uses of a tied parameter in one stage if that is free, and
separate a value and an operation that writes into it where a copy pays.

embedding ─► ... ─► head        one weight, two uses: apart, the second stage needs a mirror and one copy per step
linear ─► relu_                 one memory: apart, the second stage needs a copy per micro-batch
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from time import monotonic

import torch

from pipecompile.costs.problem_builder import with_copied_writes
from pipecompile.errors import InfeasibleError, PartitionError, PartitionWarning
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.module_names import held_tensors
from pipecompile.graph.separable_pieces import check_pieces
from pipecompile.options import Options
from pipecompile.partitioners import Partition, Problem, Progress, partition, stage_loads
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import fits
from pipecompile.partitioners.solver import trivial_lower_bound
from pipecompile.partitioners.verify import memory_text
from pipecompile.text.progress import task
from pipecompile.text.units import SECONDS, counted, written
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.tracing.user_source import warn

__all__ = [
    "bottleneck_without_constraints",
    "memory_excess",
    "solve_cut",
    "tied_groups",
    "warn_of_empty_stages",
    "warn_of_gap",
]

_log = logging.getLogger("pipecompile.partition")

_EQUAL = 1e-9
"""Relative tolerance for comparing bottlenecks."""

_WORTH = 0.01
"""Share of the bottleneck that a copy of a written value must be able to save before cuts with copies are tried."""


def solve_cut(graph: TracedGraph, problem: Problem, options: Options) -> tuple[Partition, Problem]:
    """Return the best partition and the problem that it solves: `problem`, one that keeps tied parameters together, or one that
    allows copies of values that are written into.

    Raises PartitionError if there are fewer pieces than stages, InfeasibleError if no cut fits.
    """
    end = monotonic() + options.time_limit
    try:
        found = _solve_with_ties(graph, problem, options)
    except InfeasibleError:
        with_copies = _solve_with_copies(graph, problem, options, None, end)
        if with_copies is None:
            raise
        found = with_copies
    else:
        found = _solve_with_copies(graph, found[1], options, found[0], end) or found
    if len(set(found[0].stage_of.values())) < options.n_stages and not options.steering:
        check_pieces(graph, options.n_stages)
    return found


def _solve_with_ties(graph: TracedGraph, problem: Problem, options: Options) -> tuple[Partition, Problem]:
    """Return the best partition without copies, and the problem that it solves."""
    tied = tied_groups(graph)
    if options.tied == "together" and tied:
        together = replace(problem, groups=(*problem.groups, *tied.values()))
        _check_pieces(tied, together, options.n_stages)
        return _solve(together, options, options.time_limit), together
    end = monotonic() + options.time_limit
    best = _solve(problem, options, options.time_limit)
    if options.tied == "auto":
        for group in tied.values():
            if len({best.stage_of[name] for name in group}) > 1:
                best, problem = _joined(best, problem, group, options, end - monotonic())
    return best, problem


def _solve_with_copies(
    graph: TracedGraph, problem: Problem, options: Options, best: Partition | None, end: float
) -> tuple[Partition, Problem] | None:
    """Return the best partition in which stages may write copies of what they receive, and its problem; None if none is known that
    is better than `best`. `end` is a time of `monotonic`.
    """
    loose = with_copied_writes(problem, graph)
    if loose is problem or not _copies_may_pay(problem, loose, options, best):
        return None
    try:
        copied = _solve(loose, options, max(end - monotonic(), 0.1))
    except PartitionError:
        return None
    if best is None or copied.bottleneck < best.bottleneck * (1 - _EQUAL):
        return copied, loose
    uses_more = len(set(copied.stage_of.values())) > len(set(best.stage_of.values()))
    return (copied, loose) if uses_more and copied.bottleneck <= best.bottleneck * (1 + _EQUAL) else None


def _copies_may_pay(problem: Problem, loose: Problem, options: Options, best: Partition | None) -> bool:
    """Return whether dividing clusters can shorten the slowest stage by `_WORTH`: a cluster without its largest part takes that
    long, and the cut is that far from the bound of all cuts.
    """
    if best is None and options.steering:
        return True
    clusters, parts = coarsen(problem), coarsen(loose)
    part_of = {name: part for part, names in enumerate(parts.members) for name in names}
    gain = 0.0
    for time, names in zip(clusters.time, clusters.members, strict=True):
        gain = max(gain, time - max(parts.time[part_of[name]] for name in names))
    bound = trivial_lower_bound(parts, Machine.of(loose, options.n_stages))
    bottleneck = bound if best is None else best.bottleneck
    return gain > _WORTH * bottleneck and (best is None or bottleneck > bound * (1 + _WORTH))


def bottleneck_without_constraints(
    graph: TracedGraph, problem: Problem, constrained: Partition, options: Options
) -> float:
    """Return the bottleneck in seconds of the best cut of `problem`, which `constrained` solves with the user's constraints."""
    groups = (*problem.groups, *tied_groups(graph).values()) if options.tied == "together" else problem.groups
    free = _solve(replace(problem, groups=groups), options, options.time_limit)
    return min(free.bottleneck, constrained.bottleneck)


def memory_excess(problem: Problem, cut: Partition, n_stages: int) -> str:
    """Return which device or stage holds more than its limit, both in bytes. Return "" if everything fits."""
    if problem.memory_limit is None:
        return ""
    loads = stage_loads(problem, cut.stage_of, n_stages, cut.recompute or None)
    limit = problem.memory_limit
    limits = limit if isinstance(limit, tuple) else (limit,) * len(loads)
    unit = "stage" if problem.placement is None else "device"
    over = ((d, load.memory) for d, load in enumerate(loads) if not fits(load.memory, limits[d]))
    return next(
        (f"{unit} {d} would hold {memory_text(held)}, its limit is {memory_text(limits[d])}" for d, held in over), ""
    )


def warn_of_gap(cut: Partition, options: Options) -> None:
    """Warn if the time limit or Ctrl-C ended the search before the cut was proven to be within `gap` of the best."""
    if cut.gap > options.gap and cut.status == "feasible" and options.partitioner != "dp":
        warn(
            f"the search ended, by its time limit or Ctrl-C, before the cut was proven to be the best: its slowest stage is at most "
            f"{cut.gap:.2%} above the least there can be. More than time_limit={options.time_limit:g} seconds may close this",
            PartitionWarning,
        )


def warn_of_empty_stages(stage_of: Mapping[str, int], options: Options) -> None:
    """Warn of stages without operations, unless the user steers the cut: their devices wait, and their ranks have no parameters."""
    used = set(stage_of.values())
    empty = [str(stage) for stage in range(options.n_stages) if stage not in used]
    if empty and not options.steering:
        verb = "has" if len(empty) == 1 else "have"
        warn(
            f"stage {', '.join(empty)} of {options.n_stages} {verb} no operations: by the cost model, values take longer to travel there than "
            f"they save. bandwidth= says how fast links are, in bytes a second; n_stages={len(used)} leaves no device without work",
            PartitionWarning,
        )


def _joined(
    best: Partition, problem: Problem, group: tuple[str, ...], options: Options, seconds: float
) -> tuple[Partition, Problem]:
    """Return a partition with `group` in one stage if the bottleneck stays the same, else `best`."""
    together = replace(problem, groups=(*problem.groups, group))
    try:
        joined = _solve(together, options, max(seconds, 0.1))
    except InfeasibleError:
        return best, problem
    is_free = joined.bottleneck <= best.bottleneck * (1 + _EQUAL)
    uses_as_many = len(set(joined.stage_of.values())) >= len(set(best.stage_of.values()))
    if is_free and uses_as_many:
        return replace(joined, lower_bound=best.lower_bound), together
    return best, problem


def _solve(problem: Problem, options: Options, seconds: float) -> Partition:
    progress = _ProgressLine(options.n_stages)
    with task(lambda: progress.line):
        try:
            return partition(
                problem,
                options.n_stages,
                method=options.partitioner,
                time_limit=seconds,
                gap=options.gap,
                progress=progress,
            )
        except InfeasibleError as error:  # in the words of compile's options
            hint = error.hint.replace('recompute="auto"', 'checkpoint="auto"')
            raise InfeasibleError(error.what, where=error.where, why=error.why, hint=hint) from None


class _ProgressLine:
    """The progress of a solver as one line: phase, incumbent, bound, gap. The solver calls it with a Progress."""

    def __init__(self, n_stages: int) -> None:
        self.n_stages = n_stages
        self.latest: Progress | None = None

    def __call__(self, progress: Progress) -> None:
        """Note the latest progress."""
        self.latest = progress
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s, %.1f s", self.line, progress.seconds)

    @property
    def line(self) -> str:
        """The last progress as a text."""
        text, latest = f"cutting into {counted(self.n_stages, 'stage')}", self.latest
        if latest is None:
            return text
        text += f", {latest.phase}"
        if not isfinite(latest.incumbent):
            return text
        least = f"at least {written(SECONDS, latest.bound)}, gap {latest.gap:.1%}"
        return f"{text}: slowest {written(SECONDS, latest.incumbent)}, {least}"


def tied_groups(graph: TracedGraph) -> dict[str, tuple[str, ...]]:
    """Return the nodes that use each parameter with several uses, in order, by the parameter's first name."""
    names = {id(tensor): name for name, tensor in graph.named_parameters()}
    uses: dict[int, list[str]] = {}
    for node in compute_nodes(graph):
        for tensor in held_tensors(graph, node):
            if isinstance(tensor, torch.nn.Parameter) and node.name not in (nodes := uses.setdefault(id(tensor), [])):
                nodes.append(node.name)
    return {names.get(key, nodes[0]): tuple(nodes) for key, nodes in uses.items() if len(nodes) > 1}


def _check_pieces(tied: Mapping[str, tuple[str, ...]], together: Problem, n_stages: int) -> None:
    pieces = len(coarsen(together))
    if pieces < n_stages:
        raise PartitionError(
            f"the model cannot be cut into {counted(n_stages, 'stage')} with its tied weights together",
            where="; ".join(f"{name}: {nodes[0]} ... {nodes[-1]}" for name, nodes in tied.items()),
            why="what lies between two uses of a weight must be in the same stage as both",
            hint=f"n_stages={pieces}{' or fewer' * (pieces > 1)}"
            '; or tied="auto": a mirror on each further device that uses the weight',
        )
