"""The cut of a traced graph: the partition problem solved, with the uses of a tied parameter in one stage if that is free.

embedding ─► ... ─► head        one weight, two uses: apart they need a mirror on another device, and a copy per step
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from time import monotonic

import torch
from torch import fx

from pipecompile.errors import InfeasibleError, PartitionError
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.held_tensors import held_tensors
from pipecompile.options import Options
from pipecompile.partitioners import Partition, Problem, partition, stage_loads
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.objective import fits
from pipecompile.planning.progress import solving

__all__ = ["cut", "excess", "free_bottleneck", "tied_groups"]

_FREE = 1e-9
"""A bottleneck that is worse by less than this share is no worse."""


def cut(graph: fx.GraphModule, problem: Problem, options: Options) -> tuple[Partition, Problem]:
    """The best partition that is found, and the problem it solves, which may keep more together than the one given.

    Raises PartitionError when `tied="together"` leaves fewer pieces than stages, InfeasibleError when nothing fits.
    """
    tied = tied_groups(graph)
    if options.tied == "together" and tied:
        together = replace(problem, groups=(*problem.groups, *tied.values()))
        _check_pieces(tied, together, options.n_stages)
        return _solve(together, options, options.time_limit), together
    end = monotonic() + options.time_limit
    found = _solve(problem, options, options.time_limit)
    if options.tied == "auto":
        for group in tied.values():
            if len({found.stage_of[name] for name in group}) > 1:
                found, problem = _joined(found, problem, group, options, end - monotonic())
    return found, problem


def free_bottleneck(graph: fx.GraphModule, problem: Problem, found: Partition, options: Options) -> float:
    """The bottleneck that the best cut of `problem` has, when `found` is the best with more that is forced."""
    groups = (*problem.groups, *tied_groups(graph).values()) if options.tied == "together" else problem.groups
    return min(_solve(replace(problem, groups=groups), options, options.time_limit).bottleneck, found.bottleneck)


def excess(problem: Problem, found: Partition, n_stages: int) -> str:
    """Which device, or stage, holds how much more than its limit; empty when all fits."""
    if problem.memory_limit is None:
        return ""
    rows = stage_loads(problem, found.stage_of, n_stages, found.recompute or None)
    limit = problem.memory_limit
    limits = limit if isinstance(limit, tuple) else (limit,) * len(rows)
    unit = "stage" if problem.placement is None else "device"
    over = [(d, row.memory) for d, row in enumerate(rows) if not fits(row.memory, limits[d])]
    return next((f"{unit} {d} would hold {held:.6g} bytes, its limit is {limits[d]:.6g}" for d, held in over), "")


def _joined(
    found: Partition, problem: Problem, group: tuple[str, ...], options: Options, seconds: float
) -> tuple[Partition, Problem]:
    """The same with `group` in one stage, if that costs nothing."""
    together = replace(problem, groups=(*problem.groups, group))
    try:
        other = _solve(together, options, max(seconds, 0.1))
    except InfeasibleError:
        return found, problem
    free = other.bottleneck <= found.bottleneck * (1 + _FREE)
    used = len(set(other.stage_of.values())) >= len(set(found.stage_of.values()))
    return (replace(other, lower_bound=found.lower_bound), together) if free and used else (found, problem)


def _solve(problem: Problem, options: Options, seconds: float) -> Partition:
    with solving(options.n_stages) as progress:
        try:
            return partition(
                problem, options.n_stages, method=options.partitioner, time_limit=seconds, progress=progress
            )
        except InfeasibleError as error:  # in words of compile's options
            hint = error.hint.replace('recompute="auto"', 'checkpoint="auto"')
            raise InfeasibleError(error.what, where=error.where, why=error.why, hint=hint) from None


def tied_groups(graph: fx.GraphModule) -> dict[str, tuple[str, ...]]:
    """Per parameter that several nodes use, under its first name: those nodes, in order."""
    names = {id(tensor): name for name, tensor in graph.named_parameters()}
    uses: dict[int, list[str]] = {}
    for node in compute_nodes(graph):
        for tensor in held_tensors(graph, node):
            if isinstance(tensor, torch.nn.Parameter) and node.name not in (known := uses.setdefault(id(tensor), [])):
                known.append(node.name)
    return {names.get(key, nodes[0]): tuple(nodes) for key, nodes in uses.items() if len(nodes) > 1}


def _check_pieces(tied: Mapping[str, tuple[str, ...]], together: Problem, n_stages: int) -> None:
    pieces = len(coarsen(together))
    if pieces < n_stages:
        raise PartitionError(
            f"the model cannot be cut into {n_stages} stages with its tied weights together",
            where="; ".join(f"{name}: {nodes[0]} ... {nodes[-1]}" for name, nodes in tied.items()),
            why="what lies between two uses of a weight must be in the same stage as both",
            hint=f'n_stages={pieces} or fewer; or tied="auto": a mirror on each further device that uses the weight',
        )
