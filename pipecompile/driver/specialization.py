"""One recording of the model, cut and ready to run: a build. There is one per mode and per shape of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipecompile.batching.call_inputs import FlatInputs
from pipecompile.batching.microbatches import MiniBatch
from pipecompile.driver.cache_report import Recording
from pipecompile.errors import InputError, PlanError, ScheduleError
from pipecompile.graph.cut_transfer import Cut, carried
from pipecompile.graph.stages import Stage, routes, split
from pipecompile.ir import Action, Kind, Program, Route, Schedule
from pipecompile.ir.plan import Plan
from pipecompile.ir.training_routes import training_routes
from pipecompile.options import Options
from pipecompile.parameters.tied_mirrors import Mirrors
from pipecompile.passes import lower
from pipecompile.planning.schedule_choice import schedule_of
from pipecompile.runtime.cells.deferred_batchnorm import Norms
from pipecompile.runtime.cells.stage_call import StageCode
from pipecompile.runtime.cells.torch_compiled import stage_codes
from pipecompile.runtime.cuda_graphs.stage_graphs import graphed
from pipecompile.runtime.executable import Executable, loss_cells, plain_cells
from pipecompile.runtime.interpreter import Cell
from pipecompile.runtime.model_output import Outputs, own_loss
from pipecompile.runtime.streams import DeviceStreams
from pipecompile.torch_private.modules import children_of
from pipecompile.tracing.ambient_modes import Ambient
from pipecompile.tracing.fakes.batch_symbol import Guard
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.verifiers.plan import verify_plan

__all__ = ["Build", "signature"]


def signature(model: nn.Module, inputs: FlatInputs) -> tuple[Any, ...]:
    """What a recording depends on: the inputs' structure, shapes without the batch, dtypes and plain values, the mode of
    every module, and autocast.
    """
    leaves = [_leaf_signature(leaf, dim) for leaf, dim in zip(inputs.leaves, inputs.dims, strict=True)]
    return (inputs.spec, _modes(model), Ambient.now().autocast, *leaves)


def _modes(model: nn.Module) -> tuple[bool, ...]:
    """Which modules train, in an order of ours; asked in every step, and `model.modules()` is slow."""
    found: dict[int, bool] = {}
    waiting: list[nn.Module | None] = [model]
    for module in waiting:  # grows meanwhile
        if module is not None and (key := id(module)) not in found:
            found[key] = module.training
            if children := children_of(module):
                waiting += children.values()
    return tuple(found.values())


def _leaf_signature(leaf: Any, dim: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        shape: list[int | None] = list(leaf.shape)
        if isinstance(dim, int):
            shape[dim] = None
        return tuple(shape), leaf.dtype, leaf.requires_grad
    if hasattr(leaf, "__array__") and getattr(leaf, "ndim", False):
        raise InputError(
            f"an input is a {type(leaf).__module__}.{type(leaf).__name__}",
            why="only tensors are taken apart",
            hint="torch.from_numpy(...)",
        )
    return type(leaf), leaf


@dataclass(slots=True)
class Build:
    """`plan` may come from another build: then `stage_of` is its cut, carried over to this graph. `inputs` names the flat inputs.
    `seconds` is what the recording took, `calls` how many mini-batches it served; `divided`: some came in
    several micro-batches; `executable` makes what runs a program.
    """

    graph: TracedGraph
    signature: tuple[Any, ...]
    plan: Plan
    options: Options
    stage_devices: tuple[torch.device, ...]
    routes: tuple[Route, ...]
    stages: tuple[Stage, ...]
    outputs: Outputs
    inputs: tuple[str, ...]
    mirrors: Mirrors = field(default_factory=Mirrors)
    norms: Norms = field(default_factory=Norms)
    seconds: float = 0.0
    calls: int = 0
    divided: bool = False
    executable: Callable[..., Executable] = Executable
    _codes: tuple[StageCode, ...] = ()
    _executables: dict[tuple[str, int, bool], Executable] = field(default_factory=dict)
    _schedules: dict[int, Schedule] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        graph: TracedGraph,
        mark: tuple[Any, ...],
        plan: Plan,
        options: Options,
        stage_of: Mapping[str, int] | None = None,
        samples: int | None = None,
    ) -> Build:
        """`stage_of` is the cut on this graph, when it is not that of the plan; `samples` how many a micro-batch has, when not
        as many as recorded.
        """
        verify_plan(plan)
        if len(plan.devices) != len(options.devices):
            raise PlanError(f"the plan is for {len(plan.devices)} devices, there are {len(options.devices)}")
        stage_of = stage_of or carried(plan.stage_of, graph, plan.n_stages)
        devices = tuple(options.devices[device] for device in plan.placement)
        ways = routes(graph, stage_of, samples)
        stages = split(graph, ways, stage_of, devices)
        names = tuple(node.name for node in graph.graph.nodes if node.op == "placeholder")
        return cls(
            graph, mark, plan, options.with_recompute(plan.recompute), devices, ways, stages, Outputs(graph), names
        )

    def accepts(self, mark: tuple[Any, ...], sizes: Sequence[int]) -> bool:
        """Is this the recording for a call with this signature, in micro-batches of these sizes?"""
        if mark != self.signature or self.graph.facts.grad_mode not in (None, torch.is_grad_enabled()):
            return False
        return self.broken(sizes) is None

    @property
    def cut(self) -> Cut:
        """Its cut, for other recordings of the same model."""
        stage_of = {name: stage.index for stage in self.stages for name in stage.nodes}
        return Cut.of(self.graph, stage_of, len(self.stages))

    @property
    def memories(self) -> Sequence[Hashable]:
        """The memory of each stage: stages with equal memories use the same tensor objects."""
        return self.stage_devices

    def broken(self, sizes: Sequence[int]) -> Guard | None:
        """The first guard that does not hold for one of these sizes of micro-batches."""
        guards = self.graph.facts.guards
        return next((guard for guard in guards for size in set(sizes) if not guard.holds(size)), None)

    def arrivals(self, batch: MiniBatch) -> dict[tuple[str, bool], Any]:
        """The inputs in micro-batches, by name."""
        return {(name, False): parts for name, parts in zip(self.inputs, batch.values, strict=True)}

    def recording(self) -> Recording:
        """What `explain` shows of it."""
        return Recording.of(self.graph, self.signature[1], self.seconds, self.calls)

    def reschedule(self, options: Options) -> None:
        """Other options: programs are made anew when they are asked for."""
        self.options = options.with_recompute(self.plan.recompute)
        self._executables.clear()
        self._schedules.clear()

    def require_loss(self, with_target: bool) -> None:
        """Raise InputError when a step would have nothing to start its backward from."""
        if self.options.is_target_required and not with_target:
            raise InputError("loss_fn takes a target", hint="step(x, target=...)")
        if self.options.loss_fn is None and own_loss(self.outputs.example) is None:
            raise InputError(
                "step needs a loss: the model's output is neither a scalar nor has it a `loss`",
                hint="compile(..., loss_fn=torch.nn.functional.cross_entropy)",
            )

    def step(self, n_microbatches: int, with_target: bool) -> Executable:
        """Forward, loss and backward under the schedule."""
        key = "step", n_microbatches, with_target
        return self._executables.get(key) or self._add(key, self._new_step(n_microbatches, with_target))

    def call(self, n_microbatches: int, with_backward: bool) -> Executable:
        """Forward alone, or in GPipe order with a backward to come."""
        key = "call", n_microbatches, with_backward
        return self._executables.get(key) or self._add(key, self._new_call(n_microbatches, with_backward))

    def _add(self, key: tuple[str, int, bool], executable: Executable) -> Executable:
        self._executables[key] = executable
        return executable

    def schedule(self, n_microbatches: int) -> Schedule:
        """The order of actions of a step. Raises ScheduleError when it wants stages elsewhere than their parameters are."""
        if n_microbatches not in self._schedules:
            plan = self.plan
            made = schedule_of(self.options, plan.stages, self.routes, plan.placement, n_microbatches)
            if tuple(self.options.devices[device] for device in made.placement) != self.stage_devices:
                raise ScheduleError(
                    f"schedule {made.name!r} puts stages on devices {made.placement}",
                    why=f"the plan has them on {plan.placement}, and their parameters are there",
                    hint="compile with this schedule, without the plan",
                )
            self._schedules[n_microbatches] = made
        return self._schedules[n_microbatches]

    @property
    def codes(self) -> tuple[StageCode, ...]:
        """What computes each stage; asked for when nothing rewrites the stages any more."""
        self._codes = self._codes or stage_codes(self.stages, self.options.compile_stages)
        return self._codes

    @property
    def overlap(self) -> bool:
        """Do copies run beside compute?"""
        return DeviceStreams(self.options.devices).overlap

    def _new_step(self, n_microbatches: int, with_target: bool) -> Executable:
        ways = training_routes(self.routes, len(self.stages), with_target, self.options.has_aux)
        program = lower(self.schedule(n_microbatches), ways, overlap=self.overlap)
        cells = loss_cells(self.stages, self.codes, ways, self.outputs, self.options.loss_fn)
        return self._executable(program, self._graphed(cells))

    def _new_call(self, n_microbatches: int, with_backward: bool) -> Executable:
        order = breadth_first(self.plan.placement, n_microbatches, with_backward)
        checkpoint = self.options.checkpoint if with_backward else "never"
        program = lower(order, self.routes, checkpoint=checkpoint, overlap=self.overlap)
        cells = plain_cells(self.stages, self.codes)
        return self._executable(program, cells if with_backward else self._graphed(cells))

    def _graphed(self, cells: Sequence[Cell]) -> Sequence[Cell]:
        """As CUDA graphs, if that is asked for; not for `pipe(x)` with a backward, which may be called again before."""
        return graphed(cells, self.stages, self.stage_devices) if self.options.cuda_graphs else cells

    def _executable(self, program: Program, cells: Sequence[Cell]) -> Executable:
        return self.executable(program, cells, self.options.devices, self.graph, self.mirrors, self.norms)


def breadth_first(placement: Sequence[int], n_microbatches: int, with_backward: bool) -> Schedule:
    """What `pipe(x)` runs: per device all forwards, stage by stage, then all backwards from the last stage down."""
    rows = []
    for device in range(max(placement) + 1):
        stages = [stage for stage, home in enumerate(placement) if home == device]
        ahead = [Action(stage, Kind.FORWARD, m) for stage in stages for m in range(n_microbatches)]
        back = [Action(stage, Kind.BACKWARD, m) for stage in reversed(stages) for m in range(n_microbatches)]
        rows.append((*ahead, *(back if with_backward else ())))
    return Schedule(
        len(placement), n_microbatches, tuple(placement), tuple(rows), "gpipe" if with_backward else "forward"
    )
