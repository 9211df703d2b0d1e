"""The Pipeline that `compile` returns: the model, run in stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from pipecompile.batching.call_inputs import FlatInputs, flatten
from pipecompile.batching.microbatches import loss_weights, scaled_gradients, scatter_tree, weighted_loss
from pipecompile.driver.cache_report import Recordings
from pipecompile.driver.compile_cache import Builds, Decided
from pipecompile.driver.inspection import dump_all, step_costs, write_report
from pipecompile.driver.model_proxy import StandIn
from pipecompile.graph.stages import Stage
from pipecompile.ir import AUX, LOSS, TARGET, Program, Schedule
from pipecompile.ir.candidates import Considered
from pipecompile.ir.plan import Plan
from pipecompile.ir.timeline import Timeline
from pipecompile.options import Options, load_schedule
from pipecompile.parameters.optimizer_state import load_optimizer_state, optimizer_state_of
from pipecompile.partitioners import Problem
from pipecompile.runtime.autograd_call import Call, pipelined
from pipecompile.runtime.dispatch import Dispatcher
from pipecompile.runtime.executable import Executable
from pipecompile.runtime.input_gradients import return_input_gradients
from pipecompile.runtime.registers import Spans
from pipecompile.schedules import Builder
from pipecompile.show import pipeline_html, render, stage_table
from pipecompile.simulation.simulator import simulate

__all__ = ["Pipeline"]


class Pipeline(StandIn):
    """A model that runs in pipeline stages. As a module it *is* the model: same parameters, same state_dict, same modes."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        super().__init__(model)
        self.builds = Builds(model, options)
        self._dispatcher = Dispatcher(options.dispatch, options.devices)
        self._last: tuple[Executable, Spans] | None = None

    @property
    def options(self) -> Options:
        """What was asked for; what was left open is filled in when it is chosen."""
        return self.builds.options

    def flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatInputs:
        """A call's inputs as leaves with their batch dimensions."""
        return flatten(self.model.forward, args, kwargs, self.options.batch_dims)

    def prepare(self, inputs: FlatInputs) -> None:
        """Compile for these inputs."""
        self.builds.find(inputs)

    # -- running ----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, computed in micro-batches. `backward()` on it runs the pipelined backward, in GPipe order."""
        inputs = self.flat(args, kwargs)
        build, batch = self.builds.find(inputs)
        self.builds.check_values()
        self.builds.join(build, batch)
        sources = chain(_tensors(inputs), self.model.parameters())
        wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in sources)
        executable = build.call(len(batch.sizes), with_backward=wanted)
        if wanted:
            made = pipelined(Call(executable, build.outputs, build.inputs, batch))
        else:
            frame = executable.frame(batch.sizes, build.arrivals(batch))
            executable.run(executable.inline, frame)
            parts = {name: frame.departures[name, False] for name in build.outputs.names}
            made = build.outputs.gathered(parts, batch.sizes)
            executable.finished(frame)
        return build.outputs.whole(made, batch.sizes)

    def step(self, *args: Any, target: Any = None, scaler: torch.amp.GradScaler | None = None, **kwargs: Any) -> Any:
        """Forward and backward of all micro-batches under the schedule; gradients are added to `.grad`, if it has a backward.

        Returns the detached loss of the whole mini-batch: micro-batch losses weighted by size (or their sum).
        With `has_aux` also a list of what `loss_fn` returned beside it, an entry per micro-batch. The gradients are those of
        the loss times the scale of `scaler`; the loss returned is not scaled.
        """
        inputs, trains = self.flat(args, kwargs), self.options.has_backward
        with torch.set_grad_enabled(trains):
            build, batch = self.builds.find(inputs)
        self.builds.check_values()
        parts = batch.sizes
        build.require_loss(target is not None)
        executable = build.step(len(parts), target is not None)
        threaded = self._dispatcher.threaded
        arrivals = build.arrivals(batch)
        if target is not None:
            arrivals[TARGET, False] = scatter_tree(target, len(parts), inputs.samples, self.options.batch_dims)
        weights, ahead = loss_weights(parts, mean=self.options.loss_reduction == "mean")
        arrivals[LOSS, True] = ahead if scaler is None else scaled_gradients(ahead, scaler, build.stage_devices[-1])
        with torch.set_grad_enabled(trains):
            frame = executable.frame(parts, arrivals, threaded=threaded)
            executable.run(executable.threaded if threaded else executable.inline, frame, self._dispatcher.crew)
        self._dispatcher.settle(frame.spans)
        self._last = executable, frame.spans
        losses, aux = frame.departures[LOSS, False], frame.departures.get((AUX, False))
        return_input_gradients(build.inputs, batch, frame)
        executable.finished(frame, threaded=threaded)
        loss = weighted_loss(losses, weights)
        return (loss, aux) if self.options.has_aux else loss

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_` of all parameters, wherever they are. Returns the norm that there was."""
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite)

    def reschedule(
        self, schedule: str | Path | Schedule | Builder | None = None, n_microbatches: int | None = None
    ) -> Pipeline:
        """Go on with another schedule or number of micro-batches; what is not given stays as it is.

        The recording, the cut and the parameters stay. The plan's times and bytes stay those of the micro-batch size it
        was made for. Raises ScheduleError or InputError.
        """
        schedule = self.options.schedule if schedule is None else load_schedule(schedule)
        count = self.options.n_microbatches if n_microbatches is None else n_microbatches
        self.builds.reschedule(replace(self.options, schedule=schedule, n_microbatches=count))
        self._last = None
        return self

    # -- the optimizer's state --------------------------------------------------------------------------------------

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of an optimizer of these parameters, by their names: what `get_optimizer_state_dict` of PyTorch gives with
        `flatten_optimizer_state_dict`. On ranks that of the parameters that live here.
        """
        return optimizer_state_of(dict(self.named_parameters()), optimizer)

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Take over such a state, of any layout, with what is in it for these parameters."""
        load_optimizer_state(dict(self.named_parameters()), optimizer, state_dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy (`copy.deepcopy`, `pickle`) has a model of its own and the same cut, and records at its first call."""
        return _copied, (self.model, self.options, self.builds.decided)

    # -- looking ----------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """Which node is in which stage, which stage on which device, and every route. `plan.save(path)` writes it."""
        return self.builds.latest.plan

    @property
    def considered(self) -> Considered | None:
        """What was compared to choose `n_microbatches="auto"` and `schedule="auto"`; prints as a table. None when neither was."""
        return self.plan.considered

    @property
    def problem(self) -> Problem | None:
        """The partition problem that the plan solves; None when the plan was given."""
        return self.builds.problem

    @property
    def graph(self) -> fx.GraphModule:
        """The traced graph that is cut."""
        return self.builds.latest.graph

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Per stage its GraphModule and its named ports."""
        return self.builds.latest.stages

    @property
    def schedule(self) -> Schedule:
        """The order of actions of the last step, or of the next one."""
        return self.builds.latest.schedule(self.program.n_microbatches)

    @property
    def program(self) -> Program:
        """Everything each device did in the last step, or will do in the next one."""
        if self._last is not None:
            return self._last[0].program
        count = self.options.default_microbatches
        return self.builds.latest.step(count, self.options.loss_fn is not None).program

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """One per pipeline device."""
        return self.options.devices

    @property
    def dispatch(self) -> str:
        """Who runs the program: "inline" or "threads"; "auto" until the second step has decided."""
        return self._dispatcher.choice

    @property
    def measured(self) -> Timeline | None:
        """The timeline of the last step as it ran, in seconds; None before the first."""
        return None if self._last is None else Timeline.measured(self._last[1], len(self.devices))

    def simulate(self) -> Timeline:
        """Predict a step from the costs in the plan."""
        return simulate(self.program, **step_costs(self))

    def dump(self, directory: str | Path) -> list[Path]:
        """Write everything there is to look at, and return the paths.

        plan.json, schedule.csv, program.txt, passes.txt (what each pass changed), timeline.json (for Perfetto),
        timeline.svg, graph.py, graph.dot and report.html.
        """
        return dump_all(self, directory)

    def report(self, path: str | Path = "report.html") -> Path:
        """Write one page to look at and to pass on; it needs no network.

        The table of stages, predicted and measured timelines with memory (zoom, hover), the cut with its skips, what to
        improve first, and what other numbers of devices and micro-batches and other schedules would take.
        """
        return write_report(self, path)

    def explain(self) -> Recordings:
        """The recordings that are kept: inputs, mode, guards, nodes, seconds to trace, calls; hits and evictions."""
        return self.builds.explain()

    def __str__(self) -> str:
        return render(stage_table(self.plan, self.simulate().bubble)) if self.builds else repr(self)

    def _repr_html_(self) -> str:
        return pipeline_html(self.plan, self.simulate()) if self.builds else f"<code>{self!r}</code>"

    def __repr__(self) -> str:
        state = "compiled" if self.builds else "compiles at the first call"
        return f"Pipeline({type(self.model).__name__}, n_stages={self.options.n_stages}, {state})"

    def forget(self) -> None:
        self.builds.clear()

    def place_names(self) -> str:
        return ", ".join(f"stage {stage}: {device}" for stage, device in enumerate(self.options.devices))


def _copied(model: nn.Module, options: Options, decided: Decided) -> Pipeline:
    pipe = Pipeline(model, options)
    pipe.builds.decided = decided
    return pipe


def _tensors(inputs: FlatInputs) -> list[torch.Tensor]:
    return [leaf for leaf in inputs.leaves if isinstance(leaf, torch.Tensor)]
