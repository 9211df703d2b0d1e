"""The builds of a model: found by what a call looks like, made when a call is of a new kind, all with one plan."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch import nn

from pipecompile.batching.batch_dims import batch_dims_text
from pipecompile.batching.call_inputs import FlatInputs, first_difference
from pipecompile.batching.microbatches import MiniBatch, fewer_microbatches, sizes
from pipecompile.batching.sample_lists import lists_of_tensors
from pipecompile.driver.cache_report import Recordings
from pipecompile.driver.specialization import Build, signature
from pipecompile.driver.warnings_once import Notices
from pipecompile.errors import InputError, TraceError
from pipecompile.graph.cross_sample import check_sequences, meetings
from pipecompile.graph.cut_transfer import Cut, verify_as_is
from pipecompile.graph.fingerprint import check_same
from pipecompile.graph.output_merging import joins
from pipecompile.graph.prepare import prepare
from pipecompile.ir import Schedule
from pipecompile.ir.plan import Plan
from pipecompile.options import Options
from pipecompile.parameters.meta_init import MetaInit
from pipecompile.parameters.placement import Homes, move_model, place_stages
from pipecompile.parameters.tied_mirrors import Mirrors
from pipecompile.partitioners import Problem
from pipecompile.planning.joint_search import choose
from pipecompile.planning.microbatch_counts import counts_to_try, first_count, too_small
from pipecompile.planning.planner import Chosen, make_plan
from pipecompile.runtime.cells.deferred_batchnorm import check_alone, defer_norms, updating_norms
from pipecompile.tracing.fakes.batch_symbol import Guard
from pipecompile.tracing.recording import another_size, record
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["Builds", "Decided"]

Decided = tuple[Plan | None, Problem | None, Cut | None]


class Builds:
    """The first build makes the plan, or takes the one given; later ones carry its cut over to their own graph, and only
    one that hardly does the same as the first gets a plan of its own.
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        self.model, self.options = model, options.with_choice_of(options.plan)
        self.plan: Plan | None = options.plan
        self.problem: Problem | None = None
        self._builds: list[Build] = []
        self._hits = self._traces = self._evictions = 0
        self._cut: Cut | None = None
        self._notices = Notices()
        self._homes = Homes()
        self.meta_init = MetaInit(model, self._homes.uninitialized, options.init, options.devices[0])
        self._notices.undivided(options)
        self._notices.ungraphed(options)

    def __bool__(self) -> bool:
        return bool(self._builds)

    @property
    def latest(self) -> Build:
        """The build used last. Raises InputError when nothing was compiled yet."""
        if not self._builds:
            hint = "compile(..., example_args=(x,)), or call it once"
            raise InputError("the pipeline is not compiled yet", why="no inputs have been seen", hint=hint)
        return self._builds[-1]

    @property
    def decided(self) -> Decided:
        """Plan, problem and cut; a copy of the model takes them over."""
        return self.plan, self.problem, self._cut

    @decided.setter
    def decided(self, decided: Decided) -> None:
        self.plan, self.problem, self._cut = decided

    def clear(self) -> None:
        """Record anew at the next call; the plan stays."""
        self._builds.clear()
        self._homes.clear()

    def reschedule(self, options: Options) -> None:
        """Other options for all builds, now and to come; their programs are made anew. Raises InputError for a number of
        micro-batches that would have to be chosen with another cut.
        """
        if options.n_microbatches == "auto" and self.plan is not None:
            hint = "a number; or compile anew, which cuts anew as well"
            raise InputError('n_microbatches="auto" is chosen with the cut, which stays', hint=hint)
        self.options = options
        self._notices.undivided(options)
        for build in self._builds:
            build.reschedule(options)

    def find(self, inputs: FlatInputs) -> tuple[Build, MiniBatch]:
        """The build for these inputs, made now if there is none, and the inputs in micro-batches."""
        made = self._traces
        if self.plan is None and self.options.has_open_choice:
            self._choose(inputs)
        batch = MiniBatch(inputs, self._sizes(inputs))
        mark = self._signature(batch)
        found = self._kept(mark, batch.sizes)
        if found is None:
            found, batch = self._settle(batch, mark)
        self._hits += made == self._traces
        if len(batch.sizes) > 1 and not found.divided:
            self._check_divided(found.graph)
            found.divided = True
        found.calls += 1
        self._builds.remove(found)
        self._builds.append(found)
        return found, batch

    def _choose(self, inputs: FlatInputs) -> None:
        """The first build, with the number of micro-batches and the schedule that make the shortest step of this mini-batch.

        With an entry per sample in lists every number wants a recording of its own: there it stays the default.
        """
        counts: tuple[int, ...] = (len(self._sizes(inputs)),)
        first = counts[0]
        if self.options.n_microbatches == "auto" and inputs.samples is not None and not inputs.lists:
            counts = counts_to_try(inputs.samples, len(self.options.devices))
            first = first_count(inputs.samples, self.options.default_microbatches)
        batch = MiniBatch(inputs, (1,) if inputs.samples is None else sizes(inputs.samples, first))
        mark, start = self._signature(batch), perf_counter()
        graph = self._recorded(batch.whole, batch.first)
        seconds = perf_counter() - start
        if len(counts) == 1 and first > 1:
            self._check_divided(graph)
        self._move_to_measure()
        with too_small(1 if len(counts) > 1 else first, batch.first.samples):
            plan, self.problem, samples = self._chosen(graph, inputs, counts)
        options = self.options.with_choice_of(plan)
        build = Build.make(graph, mark, plan, options, samples=samples)
        self._place(build, seconds)
        self.plan, self.options, self._cut = plan, options, build.cut
        self._keep(build)

    def _chosen(self, graph: TracedGraph, inputs: FlatInputs, counts: tuple[int, ...]) -> Chosen:
        return choose(graph, inputs, self.options, counts)

    def _sizes(self, inputs: FlatInputs) -> tuple[int, ...]:
        """As many micro-batches as asked for, and as there are samples; with lists only so many that all are equally long."""
        samples, wanted = inputs.samples, self.options.default_microbatches
        if samples is None:
            return (1,)
        if not inputs.lists:
            return sizes(samples, min(wanted, samples))
        count = next(count for count in range(min(wanted, samples), 0, -1) if samples % count == 0)
        self._notices.unequal(samples, min(wanted, samples), count)
        return sizes(samples, count)

    def _signature(self, batch: MiniBatch) -> tuple[Any, ...]:
        """What a micro-batch looks like. Raises InputError when lists make them look different."""
        if not batch.calls:
            return signature(self.model, batch.whole)
        first, *others = marks = [signature(self.model, share) for share in batch.calls]
        for m, other in enumerate(others, start=1):
            if other != first:
                raise InputError(
                    "the micro-batches of lists with an entry per sample differ in shape",
                    where=first_difference(batch.calls[0], batch.calls[m], m),
                    why="one recording serves all micro-batches of a step",
                    hint="entries of the same shapes and plain values, or n_microbatches=1",
                )
        return marks[0]

    def explain(self) -> Recordings:
        """The recordings kept, and how often they served."""
        kept = tuple(build.recording() for build in reversed(self._builds))
        return Recordings(kept, self.options.cache_size, self._hits, self._traces, self._evictions)

    def _kept(self, mark: tuple[Any, ...], parts: tuple[int, ...]) -> Build | None:
        return next((build for build in reversed(self._builds) if build.accepts(mark, parts)), None)

    def _settle(self, batch: MiniBatch, mark: tuple[Any, ...]) -> tuple[Build, MiniBatch]:
        """A build for a call that no build serves yet in the micro-batches wanted.

        When the model branches between the two sizes of micro-batches, no one recording serves both: then the samples go
        into fewer micro-batches, which are all on one side, or all of one size.
        """
        wanted = batch.sizes
        largest = self._kept(mark, wanted[:1]) or self._make(batch, mark)
        guard = largest.broken(wanted)
        if guard is None:
            return largest, batch
        self._check_free(guard, wanted)
        kept = ((self._kept(mark, parts), parts) for parts in fewer_microbatches(wanted))
        even = (parts for parts in fewer_microbatches(wanted) if len(set(parts)) == 1)
        build, parts = next(((build, parts) for build, parts in kept if build), (None, next(even)))
        self._notices.uneven(guard, wanted, parts)
        batch = MiniBatch(batch.whole, parts)
        return build or self._make(batch, mark), batch

    def _check_free(self, guard: Guard, wanted: tuple[int, ...]) -> None:
        if isinstance(self.options.schedule, Schedule):
            raise InputError(
                f"the model branches on the batch size: {guard}",
                where=f"{guard.place}, and micro-batches of {' and '.join(map(str, sorted(set(wanted))))} samples",
                why=f"the schedule given is for {len(wanted)} micro-batches, and these are on both sides of the branch",
                hint=f"a multiple of {len(wanted)} samples, or name a schedule: it is built for any number of micro-batches",
            )

    def _make(self, batch: MiniBatch, mark: tuple[Any, ...]) -> Build:
        """A recording of the first micro-batch, with the plan there is or a new one."""
        alike = [build for build in self._builds if build.signature == mark]
        parts, first = batch.sizes, batch.first
        self._notices.anew(mark, alike, parts, self.options.cache_size)
        check_alone(self.model, self.options.batch_norm, self.options.dispatch)
        start = perf_counter()
        graph = self._recorded(batch.whole, first)
        seconds = perf_counter() - start
        if len(parts) > 1:
            self._check_divided(graph)
        stage_of = self._cut.on(graph) if self._cut else None
        plan = self.plan
        if plan is None or (self._cut and not stage_of):
            plan, problem = self._new_plan(graph, first, len(parts))
            self.problem = self.problem if self.plan else problem
        elif self._cut is None:
            check_same(plan.graph, plan.fingerprint, graph)
            verify_as_is(plan.stage_of, graph, plan.n_stages)
        build = Build.make(graph, mark, plan, self.options, stage_of, first.samples)
        self._place(build, seconds)
        build.divided = len(parts) > 1
        self.plan, self._cut = self.plan or plan, self._cut or build.cut
        self._keep(build)
        return build

    def _place(self, build: Build, seconds: float) -> None:
        """Parameters to where their stages are, and mirrors of those that are needed elsewhere, too."""
        build.mirrors, build.seconds = self._mirrors(build), seconds
        self.meta_init.fill()
        if self.options.batch_norm == "deferred":
            build.norms = defer_norms(build.stages, self.model)

    def _mirrors(self, build: Build) -> Mirrors:
        copies = place_stages(build.graph, build.stages, build.stage_devices, build.memories, self._homes)
        self._homes.move_unused(self.model, self.options.devices[0])
        return copies

    def _recorded(self, whole: FlatInputs, part: FlatInputs) -> TracedGraph:
        """A recording of one micro-batch; a failure tells which inputs may not be batches at all."""
        grad = torch.is_grad_enabled()  # to be asked first: leaving inference mode turns it on
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(grad):
                return prepare(record(self.model, part, self.meta_init.device))
        except TraceError as error:
            divided = whole.samples != part.samples
            hints = [error.hint]
            if divided and (doubtful := whole.ambiguous_leaves()):
                hints.append(f"{batch_dims_text((name, None) for name in doubtful)}, if all samples share it")
            if divided and (lists := [*lists_of_tensors(dict(zip(whole.arguments, whole.values, strict=True)))]):
                hints.append(
                    f"{batch_dims_text((name, list) for name in lists)}, if there is an entry per sample in it"
                )
            if len(hints) == 1:
                raise
            hint = "; or ".join(hints)
            raise TraceError(error.what, code=error.code, where=error.where, why=error.why, hint=hint) from error

    def _check_divided(self, graph: TracedGraph) -> None:
        """Raise InputError when micro-batches are no batches to the model; tell when they change what it computes."""
        check_sequences(graph)
        self._notices.mixed(meetings(graph))
        if self.options.batch_norm is None:
            self._notices.normalised(len({id(layer) for layer in updating_norms(graph, self.model).values()}))

    def join(self, build: Build, batch: MiniBatch) -> None:
        """Find out how outputs of several micro-batches are put together. Raises InputError when they cannot be."""
        if len(batch.sizes) > 1 and build.outputs.joins is None:
            other = another_size(self.model, build.graph, batch.first, self.meta_init.device)
            build.outputs.join(joins(build.graph, other, mean=self.options.loss_reduction == "mean"))

    def check_values(self) -> None:
        """Raise InputError while there are tensors that were on `meta` and that nobody has given values."""
        self.meta_init.check()

    def _new_plan(self, graph: TracedGraph, first: FlatInputs, count: int) -> tuple[Plan, Problem | None]:
        if self.plan is None:
            self._move_to_measure()
        with too_small(count, first.samples):
            return make_plan(graph, first.leaves, self.options, count, first.samples)

    def _move_to_measure(self) -> None:
        """Move the model to the first device if costs are measured there."""
        if self.options.cost != "analytic":
            move_model(self.model, self.options.devices[0])

    def _keep(self, build: Build) -> None:
        """Add a build; the least recently used one goes when there are too many."""
        self._traces += 1
        self._builds.append(build)
        if len(self._builds) > self.options.cache_size:
            self._evictions += 1
            self._notices.evicted(self._builds.pop(0).signature)
