"""`plan_for`: the layouts of a cluster for a model, with simulated step, memory and bound, the shortest step first.

model on meta ─▶ one recording ─▶ per layout: cut, schedules, micro-batch sizes, recomputation ─▶ one row, the best that fits
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pipecompile.batching.batch_dims import BatchDims, check_batch_dims
from pipecompile.batching.call_inputs import flatten
from pipecompile.batching.model_checks import validate_model
from pipecompile.compiling import compile
from pipecompile.costs import CostError
from pipecompile.errors import InputError, PartitionError, ScheduleError
from pipecompile.graph.colocation import compute_nodes, note_ties
from pipecompile.layouts.call_text import input_words
from pipecompile.layouts.enumeration import Layout, layouts_of
from pipecompile.layouts.hardware import Cluster, cluster_of
from pipecompile.layouts.layout_table import ClusterPlan, LayoutRow, StepSeconds
from pipecompile.layouts.memory_kinds import DeviceBytes
from pipecompile.layouts.pipeline_step import PipelineModel, PipelinePoint
from pipecompile.layouts.ring_seconds import pair_bandwidths, ring_along
from pipecompile.options import Options
from pipecompile.planning.microbatch_counts import barred
from pipecompile.schedules import CATALOGUE
from pipecompile.settings.batch_settings import example_inputs
from pipecompile.settings.machine_settings import optimizer_copies
from pipecompile.simulation.gradient_reductions import reduced_makespan
from pipecompile.text.input_checks import whole
from pipecompile.text.shown_value import shown
from pipecompile.text.units import counted
from pipecompile.tracing.recording import record

__all__ = ["LayoutEstimator", "plan_for"]

SCHEDULES = ("1f1b", "interleaved", "zb-h1")

_SIZES = (1, 2, 4, 8)
"""Samples of a micro-batch that are compared."""

_CUT_SECONDS = 5.0
"""Seconds for a cut; those of the models of benchmarks/clusters.py take less."""

_GAP = 0.01
"""Relative distance to the best cut that is near enough: published steps are not predicted that closely."""

OptimizerChoice = str | Optimizer | type[Optimizer] | None

_NOT_IN_OPTIONS = ("model", "n_stages", "example_args", "example_kwargs", "mesh")


def plan_for(
    model: nn.Module,
    cluster: Cluster | str,
    *,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    batch_dims: BatchDims | None = None,
    optimizer: OptimizerChoice = "adamw",
    schedules: Sequence[str] = SCHEDULES,
    most_stages: int = 64,
) -> ClusterPlan:
    """Return what a training step of `model` would take on a cluster, for every layout of its devices; nothing is run.

    **cluster:** a `Cluster`, or a name: "8xH100", "64xH100" (nodes of 8), "4x8xA100" (4 nodes of 8).

    **example_args, example_kwargs:** the mini-batch of all devices together. Model and mini-batch may be on `meta`.

    **batch_dims:** as in `compile`.

    **optimizer:** the optimizer, whose state counts as memory, its class or its name; None for no state.

    **schedules:** names of the catalogue that are compared.

    **most_stages:** number of pipeline devices at most.

    A layout is a pipeline of some devices, copies of it, and shards, as the dimensions "pp", "dp" and "dp_shard" of a mesh
    (docs/distributed.md). The recording, the costs and the cuts are shared by all layouts. Kernels take the time of the data
    sheets, divided by the cluster's efficiency; the loss function is not counted. Raise InputError for what is not a cluster, and
    if no layout divides the mini-batch; TraceError if the model cannot be recorded.
    """
    hardware, count = cluster_of(cluster), whole("most_stages", most_stages, 1)
    names = _checked_schedules(schedules)
    estimator = LayoutEstimator.of(model, hardware, example_args, example_kwargs, batch_dims, optimizer)
    rows = [row for layout in layouts_of(hardware, count) if (row := estimator.best_row(layout, names))]
    if not rows:
        for error in estimator.failed.values():
            raise error
        what = f"no layout of {hardware} divides a mini-batch of {counted(estimator.samples, 'sample')}"
        raise InputError(what, hint=f"example_args with a multiple of {counted(hardware.size, 'sample')}")
    ordered = sorted(rows, key=lambda row: (not row.fits, row.missing, row.seconds.total))
    return ClusterPlan(type(model).__name__, hardware, estimator.samples, tuple(ordered))


@dataclass
class LayoutEstimator:
    """Estimates layouts of one model and mini-batch of `samples` samples on one cluster."""

    pipelines: PipelineModel
    samples: int
    optimizer: OptimizerChoice
    inputs: str = "example_args=(x,)"
    failed: dict[int, CostError] = field(default_factory=dict)
    """Why the model cannot run, by samples of the micro-batch: a BatchNorm layer cannot run on one."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        cluster: Cluster,
        example_args: Sequence[Any],
        example_kwargs: Mapping[str, Any] | None = None,
        batch_dims: BatchDims | None = None,
        optimizer: OptimizerChoice = "adamw",
    ) -> LayoutEstimator:
        """Record the model on two samples of the mini-batch. Raise InputError for a mini-batch without a batch dimension."""
        optimizer_copies(optimizer)
        validate_model(model)
        check_batch_dims({} if batch_dims is None else batch_dims, model.forward)
        args, kwargs = example_inputs(example_args, example_kwargs)
        hint = "example_args=(torch.empty(512, 3, 224, 224, device='meta'),)"
        if not (args or kwargs):
            raise InputError("plan_for needs an example of a mini-batch", hint=hint)
        inputs = flatten(model.forward, args, kwargs, batch_dims)
        if inputs.samples is None:
            raise InputError("the mini-batch has no batch dimension", hint=hint)
        graph = note_ties(record(model, inputs.resized(min(2, inputs.samples))))
        pipelines = PipelineModel(graph, inputs, cluster, _usual_options(model))
        words = input_words(model, args, kwargs, batch_dims) + ", optimizer=optimizer" * isinstance(
            optimizer, Optimizer
        )
        return cls(pipelines, inputs.samples, optimizer, words)

    @property
    def cluster(self) -> Cluster:
        return self.pipelines.cluster

    def best_row(self, layout: Layout, schedules: Sequence[str]) -> LayoutRow | None:
        """Return the fitting row with the shortest step, else that which lacks least; None if the mini-batch does not divide.

        Points are compared with the cut that all sizes share; the best one also has the cut of its own size.
        """
        rows: dict[PipelinePoint, LayoutRow] = {}
        for point in self._points(layout, schedules):
            if (row := self.row(layout, point)) is not None:
                rows[point] = row
                if row.memory.total - row.memory.activations > self.cluster.capacity:
                    break  # the weights alone are too many, whatever the schedule
        if not rows:
            return None
        best = min(rows, key=lambda point: _rank(rows[point]))
        own = None if layout.pp == 1 else self.row(layout, replace(best, has_own_cut=True))
        return min(filter(None, (own, rows[best])), key=_rank)

    def row(self, layout: Layout, point: PipelinePoint, recompute: Sequence[bool] | None = None) -> LayoutRow | None:
        """Return the row of one point. With `recompute` None, stages recompute where memory requires it. None: there is no such cut."""
        try:
            flags = self._flags_needed(layout, point) if recompute is None else tuple(recompute)
        except (PartitionError, ScheduleError):
            return None
        devices = self._devices(layout, point, flags)
        fullest = max(devices, key=lambda device: device.total)
        missing = max(0.0, fullest.total - self.cluster.capacity)
        seconds = self._seconds(layout, point, flags)
        bound = self.pipelines.lower_bound(point) + seconds.gather + seconds.optimizer
        return LayoutRow(
            layout, point.n_stages, point.schedule, point.count, point.samples, flags, seconds,
            min(bound, seconds.total), fullest, missing, _name_of(self.optimizer), self.inputs,
        )  # fmt: skip

    def _points(self, layout: Layout, schedules: Sequence[str]) -> Iterator[PipelinePoint]:
        part = self.samples // layout.replicas
        if self.samples % layout.replicas:
            return
        nodes = len(compute_nodes(self.pipelines.graph))
        for name in schedules if layout.pp > 1 else ("1f1b",):
            chunks = CATALOGUE[name].chunks or (1 if layout.pp == 1 else 2)
            for samples in (size for size in _SIZES if part % size == 0):
                if layout.pp * chunks <= nodes and not barred(self.pipelines.graph, [samples]) and self._runs(samples):
                    yield PipelinePoint(layout.pp, name, samples, part // samples, chunks)

    def _runs(self, samples: int) -> bool:
        """Return whether the model runs on a micro-batch of `samples` samples."""
        if samples not in self.failed:
            try:
                self.pipelines.costs(samples)
            except CostError as error:
                self.failed[samples] = error
        return samples not in self.failed

    def _flags_needed(self, layout: Layout, point: PipelinePoint) -> tuple[bool, ...]:
        """Return a flag per stage: the stages of devices that hold too much without recomputation."""
        none = (False,) * point.n_stages
        over = [d.total > self.cluster.capacity for d in self._devices(layout, point, none)]
        return tuple(over[device] for device in self.pipelines.draft(point).placement)

    def _devices(self, layout: Layout, point: PipelinePoint, recompute: Sequence[bool]) -> list[DeviceBytes]:
        weights, placement = self.pipelines.weights(point), self.pipelines.draft(point).placement
        activations = self.pipelines.activations(point, recompute)
        return [
            DeviceBytes.of(
                [weight for weight, place in zip(weights, placement, strict=True) if place == device],
                activations[device],
                replicas=layout.replicas,
                shards=layout.dp_shard,
                optimizer_state=optimizer_copies(self.optimizer),
            )
            for device in range(point.pp)
        ]

    def _seconds(self, layout: Layout, point: PipelinePoint, recompute: Sequence[bool]) -> StepSeconds:
        cluster, draft = self.cluster, self.pipelines.draft(point)
        run = self.pipelines.simulate(point, recompute, pair_bandwidths(cluster, layout))
        shards, copies = ring_along(cluster, layout, "dp_shard"), ring_along(cluster, layout, "dp")
        weights = self.pipelines.weights(point)
        is_sharded = layout.dp_shard > 1
        each = [shards.half(w.trained) if is_sharded else copies.all_reduce(w.trained) for w in weights]
        reduced = max(reduced_makespan(run.complete, draft.placement, each), run.seconds)
        held, trained = [0.0] * point.pp, [0.0] * point.pp
        for weight, device in zip(weights, draft.placement, strict=True):
            held[device] += weight.parameters
            trained[device] += weight.trained
        after = copies.all_reduce(max(trained) / layout.dp_shard) if is_sharded else 0.0
        touched = (
            max(trained) / layout.dp_shard * (3 + 2 * optimizer_copies(self.optimizer))
        )  # read all, write all but gradients
        return StepSeconds(
            gather=shards.half(max(held)),
            pipeline=run.seconds,
            reduction=reduced - run.seconds + after,
            optimizer=touched / cluster.spec.bandwidth,
        )


def _rank(row: LayoutRow) -> tuple[float, float]:
    """Return the bytes that a row lacks, then its seconds: less is better."""
    return row.missing, row.seconds.total


def _name_of(optimizer: OptimizerChoice) -> str | None:
    """Return the name of an optimizer as `compile` takes it; None for an optimizer itself, which a line passes by its variable."""
    return (
        optimizer.__name__.lower() if isinstance(optimizer, type) else optimizer if isinstance(optimizer, str) else None
    )


def _checked_schedules(schedules: Sequence[str]) -> tuple[str, ...]:
    """Return the names. Raise InputError if `schedules` is not a sequence of names of training schedules."""
    if not isinstance(schedules, str | Sequence):
        raise InputError(f"schedules={shown(schedules)} is not a sequence of names", hint=f"schedules={SCHEDULES}")
    entries = CATALOGUE.items()
    known = [name for name, one in entries if not (one.has_slices or one.has_copies) and name != "forward"]
    names = (schedules,) if isinstance(schedules, str) else tuple(schedules)
    for name in names or ("",):
        if not isinstance(name, str) or name not in known:
            raise InputError(
                f"schedules: {shown(name)} is not known", why=f"known are {', '.join(known)}", hint=f"{SCHEDULES}"
            )
    return names


def _usual_options(model: nn.Module) -> Options:
    """Return the options that `compile` takes by default, on one device."""
    defaults = {name: each.default for name, each in inspect.signature(compile).parameters.items()}
    values = {name: value for name, value in defaults.items() if name not in _NOT_IN_OPTIONS}
    chosen = {"devices": ["cpu"], "cost": "analytic", "partitioner": "dp", "time_limit": _CUT_SECONDS, "gap": _GAP}
    return Options.of(model, 1, **(values | chosen))
