"""A specialization: one recording of the model, cut into stages that are placed and ready to run.

There is one specialization per signature: per mode of the modules, structure and dtypes of the inputs, and shapes without
the batch. `phases.specialize` makes them, the compile cache keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pipecompile.batching.microbatches import LossDivisor, MiniBatch, Weights, loss_weights
from pipecompile.driver.cache_report import Recording
from pipecompile.driver.left_tables import LeftTables
from pipecompile.driver.loss_analysis import LossAnalysis
from pipecompile.driver.phase_log import PhaseLog
from pipecompile.driver.signature import Signature, is_served
from pipecompile.driver.target_values import target_kind, target_values
from pipecompile.errors import InputError
from pipecompile.graph.batch_flow import BatchFlow
from pipecompile.graph.cross_sample import single_value_norm
from pipecompile.graph.cut_transfer import Cut
from pipecompile.graph.stages import Stage
from pipecompile.ir import TARGET, Route, Schedule
from pipecompile.ir.plan import Plan
from pipecompile.options import Options
from pipecompile.parameters.tied_mirrors import Mirrors
from pipecompile.runtime.cells.deferred_batchnorm import DeferredNorms
from pipecompile.runtime.cells.side_effects import called_modules
from pipecompile.runtime.cells.sliced import SliceState
from pipecompile.runtime.cells.stage_call import StageCode
from pipecompile.runtime.cells.torch_compiled import stage_codes
from pipecompile.runtime.executable import Executable
from pipecompile.runtime.results import Outputs, own_loss
from pipecompile.torch_private.modules import forward_hooks_of
from pipecompile.tracing.fakes.batch_symbol import Guard
from pipecompile.tracing.graph_facts import GraphFacts
from pipecompile.tracing.guards.lifted_state import NOTHING_LIFTED
from pipecompile.tracing.guards.state_guards import ReadChange, StateGuards
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.tracing.user_source import line_of

__all__ = ["Specialization"]


@dataclass(slots=True, eq=False)
class Specialization:
    """The stages of one recording, and the programs that run them.

    `plan` may come from an earlier specialization: its cut is then carried over to `graph`. `inputs` are the names of the flat
    inputs, `stage_devices[s]` is the device of stage s. `executable` constructs what runs a program; `overlaps` says that ranks
    copy beside compute. `number` counts the recordings of the pipeline, from 1; `calls` counts the mini-batches that were run, and
    `is_divided` says that one came in several micro-batches. Once `calls` is `check_at[grad mode]`, the recording is checked
    against the model; `checked` is the outcome. `merging` is the specialization that runs calls in several micro-batches, once
    there was one (output_merge.py). `losses` has the analysis of the loss for each kind of target, `counts` that of the loss of a
    micro-batch that is not cut (listed_weights.py). `is_loss_tried` says that a step over a list has looked for what the loss reads
    (loss_reads.py). `slicing` has the stages for slices of sequences (sliced_stages.py), by the number of slices per micro-batch. A
    specialization of slices has `states`, one per stage, which the stage reads. `tables` are those that its first run leaves on the
    model; with them there, `bare_guards` are the guards on the state without them.
    """

    graph: TracedGraph
    signature: Signature
    plan: Plan
    options: Options
    routes: tuple[Route, ...]
    stages: tuple[Stage, ...]
    mirrors: Mirrors
    norms: DeferredNorms
    executable: Callable[..., Executable]
    log: PhaseLog
    guards: StateGuards | None = None
    overlaps: bool = False
    changes: tuple[ReadChange, ...] = ()
    number: int = 0
    calls: int = 0
    check_at: tuple[float, float] = (0, 0)
    checked: str = ""
    is_divided: bool = False
    is_loss_tried: bool = False
    states: tuple[SliceState, ...] = ()
    slicing: dict[int, Any] = field(default_factory=dict)
    executables: dict[tuple[str, int, bool], Executable] = field(default_factory=dict)
    schedules: dict[int, Schedule] = field(default_factory=dict)
    merging: Specialization | None = None
    losses: dict[Any, LossAnalysis] = field(default_factory=dict)
    counts: dict[Any, LossAnalysis] = field(default_factory=dict)
    facts: GraphFacts = field(init=False)
    tables: LeftTables = field(init=False)
    bare_guards: StateGuards | None = field(default=None, init=False)
    inputs: tuple[str, ...] = field(init=False)
    stage_devices: tuple[torch.device, ...] = field(init=False)
    single_value_norm: str = field(init=False)
    _codes: tuple[StageCode, ...] = ()
    _layers: tuple[torch.nn.Module, ...] | None = field(default=None, init=False)
    _hooks: tuple[Any, ...] = field(default=(), init=False)
    _flow: BatchFlow | None = None
    _outputs: Outputs | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.facts, self.tables = self.graph.facts, LeftTables(self.graph)
        self.inputs = tuple(node.name for node in self.graph.graph.nodes if node.op == "placeholder")
        self.stage_devices = tuple(self.options.devices[device] for device in self.plan.placement)
        self.single_value_norm = single_value_norm(self.graph)

    @property
    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        """The parameters of the model when it was recorded, without those that the recording does not use."""
        return self.guards.parameters if self.guards else ()

    @property
    def outputs(self) -> Outputs:
        """The structure of the outputs, and how they merge. The first run needs it."""
        self._outputs = self._outputs or Outputs(self.graph)
        return self._outputs

    @property
    def flow(self) -> BatchFlow:
        """The flow of the batch through the graph, analysed at the first access."""
        self._flow = self._flow or BatchFlow(self.graph)
        return self._flow

    @property
    def cut(self) -> Cut:
        """The cut of this recording, for other recordings of the same model."""
        stage_of = {name: stage.index for stage in self.stages for name in stage.nodes}
        return Cut.of(self.graph, stage_of, len(self.stages))

    @property
    def codes(self) -> tuple[StageCode, ...]:
        """The function of each stage. The first access compiles the stages if `compile_stages` asks for that."""
        self._codes = self._codes or stage_codes(self.stages, self.options.compile_stages)
        return self._codes

    @property
    def is_overlapped(self) -> bool:
        """Whether copies run beside compute, on streams of their own."""
        return self.overlaps or self.options.overlap

    def accepts(self, signature: Signature, sizes: Sequence[int]) -> bool:
        """Return whether this recording is right for a call with this signature in micro-batches of these sizes, now."""
        if not self.is_of(signature) or self.facts.grad_mode not in (None, torch.is_grad_enabled()):
            return False
        if self.broken_guard(sizes) is not None:
            return False
        return self.is_of_state()

    def is_of_state(self) -> bool:
        """Return whether this recording is right for the present state of the model: what it read is as it was, or has its own tables."""
        if self.guards is None or ((self.guards.fetch.is_unchanged() or self.guards.hold()) and self.tables.hold()):
            return True
        if self.bare_guards is None or not self.bare_guards.hold():
            return False
        self.guards, self.bare_guards = self.bare_guards, None
        self.tables.forget()
        return True

    def take_state(self) -> None:
        """Serve for the present state of the model too, which has other tables than the recorded state."""
        if self.guards is not None and self.facts.reads is not None:
            self.bare_guards = self.bare_guards or self.guards
            self.guards = replace(self.facts.reads, lifted=self.guards.lifted).guards()

    def is_of(self, signature: Signature) -> bool:
        """Return whether this recording is for calls with this signature."""
        return signature == self.signature or is_served(signature, self.signature, self.asked)

    @property
    def asked(self) -> Mapping[str, str]:
        """The details that the model asks for beside its state, the layouts of inputs or inference mode, each with the user's line."""
        return self.facts.reads.asked if self.facts.reads else {}

    def changed_by_run(self) -> tuple[ReadChange, ...]:
        """Return what the run that has just ended has changed of the state that the recording reads. Pieces that are kept whole may
        do so.
        """
        if self.guards is None or not self.facts.kept:
            return ()
        lifted = self.guards.lifted
        places = {label: holder.get() for label, holder in lifted.holders.items()}
        changed = [
            ReadChange(label, before, places[label], "")
            for label, before in lifted.numbers.items()
            if places.get(label, before) != before
        ]
        return (*changed, *(() if self.guards.fetch.is_unchanged() else self.guards.changes()))

    def state_changes(self) -> tuple[ReadChange, ...]:
        """Return what has changed of the state that the recording read."""
        return tuple(self.guards.changes()) if self.guards else ()

    def broken_guard(self, sizes: Sequence[int]) -> Guard | None:
        """Return the first guard that fails for one of these sizes of micro-batches, in samples."""
        guards = self.facts.guards
        return next((guard for guard in guards for size in set(sizes) if not guard.holds(size)), None)

    def arrivals(self, batch: MiniBatch) -> dict[tuple[str, bool], Any]:
        """Return the inputs in micro-batches, by (name, False): False says that the value is not a gradient."""
        return {(name, False): parts for name, parts in zip(self.inputs, batch.values, strict=True)}

    def loss_weights(self, batch: MiniBatch, target: Any, arrivals: Mapping[tuple[str, bool], Any]) -> Weights:
        """Return the weight of each micro-batch's loss: by samples, or by what the loss counts."""
        analysis = self.losses.get(target_kind(target))
        divisor = None if analysis is None else analysis.divisor
        if divisor is None or len(batch.sizes) == 1:
            return loss_weights(batch.sizes, mean=self.options.loss_reduction == "mean")
        if isinstance(divisor, LossDivisor) and divisor.is_complete(self.whole_values(batch, target)):
            return loss_weights(batch.sizes, mean=True)
        return divisor.shares(*self.step_values(batch, target, arrivals), batch.sizes)

    @staticmethod
    def is_current(analysis: LossAnalysis | None) -> bool:
        """Return whether there is an analysis of the loss, and the loss function has not changed since."""
        if analysis is None or (guards := analysis.guards) is None:
            return analysis is not None
        is_unchanged: bool = guards.fetch.is_unchanged() or guards.hold()
        return is_unchanged

    def step_values(
        self, batch: MiniBatch, target: Any, arrivals: Mapping[tuple[str, bool], Any]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the inputs and the target of the mini-batch and of each micro-batch, and the target's leaves, by name."""
        count = len(batch.sizes)
        targets = arrivals.get((TARGET, False), [None] * count)
        parts = [
            {**{name: arrivals[name, False][m] for name in self.inputs}, **target_values(targets[m])}
            for m in range(count)
        ]
        return self.whole_values(batch, target), parts

    @property
    def loss_reads_inputs(self) -> bool:
        """Whether what the loss divides by is computed from inputs of the model, in a step so far."""
        divisors = [one.divisor for one in self.losses.values() if one.divisor is not None]
        return any(
            not isinstance(divisor, LossDivisor) or any(name in self.inputs for name in divisor.inputs)
            for divisor in divisors
        )

    def whole_values(self, batch: MiniBatch, target: Any) -> dict[str, Any]:
        """Return the inputs and the target of the mini-batch, and the target's leaves, by name."""
        return {**dict(zip(self.inputs, batch.whole.leaves, strict=False)), **target_values(target)}

    def report(self) -> Recording:
        """Return the row of `pipe.explain()`."""
        risks = [f"{label}, {why}" for label, why in (self.guards.risks if self.guards else {}).items()]
        seconds = self.log.seconds["record"]
        recording = Recording.of(self.graph, self.signature[1], seconds, self.calls, [*map(str, self.changes)], risks)
        lifted = self.guards.lifted if self.guards else NOTHING_LIFTED
        if not lifted.holders:
            return replace(recording, checked=self.checked)
        conditions = [f"{one}: {one.answer} ({line_of(one.place)})" for one in lifted.comparisons.values()]
        return replace(
            recording, checked=self.checked, read=tuple(lifted.holders), guards=(*recording.guards, *conditions)
        )

    def note_call(self) -> bool:
        """Count a mini-batch. Return whether layers have other forward hooks than at the one before.

        A program undoes in a recomputation what the hooks do that it knows of.
        """
        self.calls += 1
        if self.options.checkpoint == "never":
            return False
        if self._layers is None:
            self._layers = tuple(one for stage in self.stages for one in called_modules(stage))
        hooks = tuple(hook for one in self._layers for table in forward_hooks_of(one) for hook in table.values())
        if [*map(id, hooks)] == [*map(id, self._hooks)]:
            return False
        self._hooks = hooks
        return True

    def drop_programs(self) -> None:
        """Drop what runs: programs know what their stages draw and change, forward hooks of layers included."""
        self.executables.clear()
        self.slicing.clear()
        if self.merging is not None:
            self.merging.executables.clear()

    def reschedule(self, options: Options) -> None:
        """Take other options. Programs are lowered anew at their next use."""
        self.options = options.with_recompute(self.plan.recompute)
        self.executables.clear()
        self.schedules.clear()
        self.slicing.clear()
        if self.merging is not None and self.merging is not self:
            self.merging.reschedule(options)

    def require_loss(self, with_target: bool) -> None:
        """Raise InputError if a step has no loss to start its backward from."""
        if self.options.is_target_required and not with_target:
            raise InputError("loss_fn takes a target", hint="step(x, target=...)")
        if self.options.loss_fn is None and own_loss(self.outputs.example) is None:
            raise InputError(
                "step needs a loss: the model's output is not a scalar, and has no attribute `loss`",
                hint="compile(..., loss_fn=torch.nn.functional.cross_entropy)",
            )
