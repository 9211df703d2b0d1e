"""The builds of a model: found by what a call looks like, made when a call is of a new kind, all with one plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from pipecompile.build import Build, signature
from pipecompile.errors import InputError
from pipecompile.options import Options
from pipecompile.partitioners import Problem
from pipecompile.passes.graphs import prepare
from pipecompile.placing import Homes, move_model, place_stages
from pipecompile.plan import Plan
from pipecompile.planning import make_plan
from pipecompile.runtime.microbatch import scatter, sizes
from pipecompile.tracing.inputs import FlatInputs
from pipecompile.tracing.recorder import record

__all__ = ["Builds"]

KEPT = 16
"""How many builds are kept; the least recently used goes first."""


class Builds:
    """The first build makes the plan, or takes the one given; later ones carry it over to their own graph."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        self.model, self.options = model, options
        self.plan: Plan | None = options.plan
        self.problem: Problem | None = None
        self._builds: list[Build] = []
        self._homes = Homes()

    def __bool__(self) -> bool:
        return bool(self._builds)

    @property
    def latest(self) -> Build:
        """The build used last. Raises InputError when nothing was compiled yet."""
        if not self._builds:
            hint = "compile(..., example_args=(x,)), or call it once"
            raise InputError("the pipeline is not compiled yet", why="no inputs have been seen", hint=hint)
        return self._builds[-1]

    def clear(self) -> None:
        """Record anew at the next call; the plan stays."""
        self._builds.clear()
        self._homes.clear()

    def reschedule(self, options: Options) -> None:
        """Other options for all builds, now and to come; their programs are made anew."""
        self.options = options
        for build in self._builds:
            build.reschedule(options)

    def find(self, inputs: FlatInputs) -> tuple[Build, tuple[int, ...]]:
        """The build for these inputs, made now if there is none, and the sizes of the micro-batches."""
        samples = inputs.samples
        count = 1 if samples is None else min(self.options.default_microbatches, samples)
        parts = sizes(samples or 1, count)
        mark = signature(self.model, inputs)
        known = next((build for build in reversed(self._builds) if build.accepts(mark, parts)), None)
        found = known or self._make(inputs, mark, parts)
        others = [build for build in self._builds if build is not found]
        self._builds = [*others[1 - KEPT :], found]
        return found, parts

    def _make(self, inputs: FlatInputs, mark: tuple[Any, ...], parts: tuple[int, ...]) -> Build:
        pairs = zip(inputs.leaves, inputs.dims, strict=True)
        first = [scatter(leaf, dim, len(parts))[0] for leaf, dim in pairs]
        with torch.inference_mode(False):
            graph = prepare(record(self.model, inputs.part(first, parts[0])))
        _check_guards(graph, parts)
        plan = self.plan
        if plan is None:
            move_model(self.model, self.options)
            plan, self.problem = make_plan(graph, first, self.options, len(parts))
        build = Build.make(graph, mark, plan, self.options, len(parts))
        build.mirrors = place_stages(build, self._homes)
        self.plan = plan
        return build


def _check_guards(graph: fx.GraphModule, parts: tuple[int, ...]) -> None:
    """Micro-batches of two sizes may be on two sides of a branch of the model: no one recording serves both."""
    broken = [guard for guard in graph.meta["guards"] if not all(guard.holds(size) for size in set(parts))]
    if broken:
        raise InputError(
            f"the model branches on the batch size: {broken[0]}",
            where=f"micro-batches of {' and '.join(map(str, sorted(set(parts))))} samples",
            hint="choose n_microbatches so that all micro-batches are on one side",
        )
