"""The Pipeline that `compile` returns: the model, run in stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipecompile.batching.call_inputs import FlatInputs, flatten
from pipecompile.batching.microbatches import MiniBatch, weighted_loss
from pipecompile.driver.backend import Backend
from pipecompile.driver.cache_report import Recordings
from pipecompile.driver.call_lock import exclusive
from pipecompile.driver.compile_cache import CompileCache
from pipecompile.driver.compile_context import Decision
from pipecompile.driver.evaluation import Evaluation, ValidationLoop
from pipecompile.driver.inspection import Inspection
from pipecompile.driver.joined_calls import joined_call
from pipecompile.driver.listed_steps import ListedSteps
from pipecompile.driver.model_proxy import ModelProxy
from pipecompile.driver.programs import call_executable, check_step, step_executable, step_schedule
from pipecompile.driver.sliced_steps import SlicedSteps
from pipecompile.driver.specialization import Specialization
from pipecompile.driver.step_arrivals import step_arrivals
from pipecompile.driver.whole_batch_steps import whole_batch_step
from pipecompile.graph.stages import Stage
from pipecompile.ir import AUX, LOSS, Program, Schedule
from pipecompile.ir.candidates import Considered
from pipecompile.ir.plan import Plan
from pipecompile.ir.timeline import Timeline
from pipecompile.ir.written_program import WrittenProgram
from pipecompile.options import Options, load_schedule
from pipecompile.partitioners import Problem
from pipecompile.runtime.dispatch import Dispatcher
from pipecompile.runtime.executable import Executable
from pipecompile.runtime.gpu_spans import seconds_of
from pipecompile.runtime.registers import Frame, Spans
from pipecompile.runtime.results import return_input_gradients, without_backward
from pipecompile.schedules import Builder
from pipecompile.show import StagePicture, StageTable, pipeline_html, render
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["Pipeline"]


class Pipeline(ModelProxy):
    """A model that runs in pipeline stages. As a module it *is* the model: same parameters, same state_dict, same modes."""

    def __init__(self, model: nn.Module, options: Options, backend: Backend | None = None) -> None:
        super().__init__(model)
        self._cache = CompileCache(model, options, backend or Backend())
        self._dispatcher = Dispatcher(options.dispatch, options.devices)
        self._listed = ListedSteps(model, self._cache, self._dispatcher)
        self._last: tuple[Executable, Spans] | None = None
        self._samples: int | None = None

    @property
    def _options(self) -> Options:
        """The options of `compile`, with what was left open filled in once it is chosen."""
        return self._cache.options

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatInputs:
        return flatten(self.model.forward, args, kwargs, self._options.batch_dims)

    @exclusive
    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compile for these inputs now, instead of at the first call with such inputs. Nothing of the model is computed."""
        may_be_listed = self._options.split or "microbatches" in kwargs
        if may_be_listed and (listed := self._listed.of_example(args, kwargs)) is not None:
            self._cache.find_each(listed)
        elif self._options.n_slices > 1:
            SlicedSteps(self._cache, self._dispatcher).prepare(self._flatten(args, kwargs))
        else:
            specialization, batch = self._cache.find(self._flatten(args, kwargs))
            check_step(specialization, len(batch.sizes))

    @exclusive
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output, computed in micro-batches. `backward()` on it runs the pipelined backward, in GPipe order.

        With `microbatches`, a list as for `step` but without targets, returns a list of outputs. One `backward()` serves all.
        """
        may_be_listed = self._options.split or "microbatches" in kwargs
        if may_be_listed and (listed := self._listed.of_call(args, kwargs)) is not None:
            return self._listed.call(listed)
        return joined_call(self._cache, self._flatten(args, kwargs))[0]

    @exclusive
    def step(
        self,
        *args: Any,
        target: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        microbatches: Iterable[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forward and backward of all micro-batches under the schedule. Gradients are added to `.grad`.

        Returns the detached loss of the whole mini-batch: micro-batch losses weighted by what they count, or their sum. With
        `has_aux`, returns (loss, list of what `loss_fn` returned beside the loss, one entry per micro-batch). Gradients are those of
        the loss times the scale of `scaler`; the returned loss is not scaled. No gradients are added under `torch.no_grad` and
        `torch.inference_mode`, nor by a schedule without a backward.

        `microbatches` is a list of micro-batches of any sizes, in place of a mini-batch: mappings of arguments with the target
        among them, tuples that end with the target, or `Microbatch(*args, target=, **kwargs)`. Their losses are weighted by what
        the loss counts. Raises InputError for an empty list, and for micro-batches with different arguments.
        """
        may_be_listed = microbatches is not None or self._options.split
        if may_be_listed and (listed := self._listed.of_step(args, kwargs, target, microbatches)) is not None:
            self._samples, (loss, aux, self._last) = None, self._listed.step(listed, scaler, self._last)
            return (loss, aux) if self._options.has_aux else loss
        trains = self._options.is_training_now
        if self._options.across_batch == "exact" or (trains and self._options.n_slices > 1):
            return self._other_step(self._flatten(args, kwargs), target, scaler)
        is_whole = trains == self._options.has_backward
        with torch.set_grad_enabled(trains):
            specialization, batch = self._cache.find(self._flatten(args, kwargs))
            specialization.require_loss(target is not None)
            key = "step" if is_whole else "loss", len(batch.sizes), target is not None
            executable = specialization.executables.get(key) or step_executable(specialization, *key[1:], kind=key[0])
            arrivals, weights = step_arrivals(self._cache, specialization, batch, target, scaler)
            frame = self._run(executable, specialization, batch, arrivals)
        losses, aux = frame.departures[LOSS, False], frame.departures.get((AUX, False))
        return_input_gradients(specialization.inputs, batch, frame)
        executable.finished(frame, threaded=self._dispatcher.is_threaded(is_ordered=executable.is_ordered))
        self._cache.context.check_losses(losses, specialization.changed_by_run(), trains=trains)
        if is_whole:
            self._note_step(executable, frame.spans, batch.whole.samples)
        loss = without_backward(weighted_loss(losses, weights))
        return (loss, aux) if self._options.has_aux else loss

    @exclusive
    def evaluate(self, batches: Iterable[Any], metric: Callable[..., Any] | None = None) -> Evaluation:
        """Return the loss over all `batches`, as `step` takes them, in eval mode and without gradients; modes are restored.

        A batch is a mapping of arguments, or a tuple whose last entry is the target. The loss is the mean over samples. `metric(output,
        target)` of a whole batch returns a number, a mapping to numbers, or None; their means are in the result. Other threads wait.
        """
        return ValidationLoop(self, self._options, self._listed.samples_of).run(batches, metric)

    def _run(self, executable: Executable, found: Specialization, batch: MiniBatch, arrivals: dict[Any, Any]) -> Frame:
        """Check the recording if that is due. Run the program of a step in this thread or a thread per device; return its frame."""
        self._cache.check(found, batch, arrivals)
        threaded = self._dispatcher.is_threaded(is_ordered=executable.is_ordered_now())
        frame = executable.frame(batch.sizes, arrivals, threaded=threaded)
        executable.run(executable.code(threaded=threaded), frame, self._dispatcher.workers(threaded=threaded))
        self._cache.context.warnings.drawn(executable.draw_warning(threaded=threaded))
        return frame

    def _other_step(self, inputs: FlatInputs, target: Any, scaler: torch.amp.GradScaler | None) -> Any:
        """Run a step in which all samples meet behind the last stage, or one on slices of sequences."""
        if self._options.across_batch != "exact":
            loss, ran = SlicedSteps(self._cache, self._dispatcher).step(inputs, target, scaler)
            self._note_step(*ran, inputs.samples)
            return loss
        loss, aux, self._last = whole_batch_step(self._cache, inputs, target, scaler, self._last)
        self._samples = inputs.samples
        return (loss, aux) if self._options.has_aux else loss

    def _note_step(self, executable: Executable, spans: Spans, samples: int | None) -> None:
        self._dispatcher.settle(spans, is_ordered=executable.is_ordered)
        self.__dict__.update(_last=(executable, spans), _samples=samples)  # nn.Module's own way takes 10 us

    def reschedule(
        self, schedule: str | Path | Schedule | Program | Builder | None = None, n_microbatches: int | None = None
    ) -> Pipeline:
        """Go on with another schedule or number of micro-batches. None keeps the present one. Returns the pipeline itself.

        The recording, the cut, the parameters, and the plan's times and bytes stay. Raises ScheduleError or InputError.
        """
        schedule = self._options.schedule if schedule is None else load_schedule(schedule)
        of_schedule = schedule.n_microbatches if isinstance(schedule, Schedule) else self._options.n_microbatches
        count = of_schedule if n_microbatches is None else n_microbatches
        self._cache.reschedule(replace(self._options, schedule=schedule, n_microbatches=count))
        self._last = None
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the model, the options and the cut. The copy records at its first call."""
        return _copied, (self.model, self._options, self._cache.decision)

    @property
    def plan(self) -> Plan:
        """The stage of every node, the device of every stage, and every route. `pipe.plan.save(path)` writes it."""
        return self._cache.latest.plan

    @property
    def considered(self) -> Considered | None:
        """The candidates for what was left to choose (`"auto"`), as a table; None if nothing was."""
        return self.plan.considered

    @property
    def problem(self) -> Problem | None:
        """The partition problem that the plan solves; None if the plan was given."""
        return self._cache.decision.problem

    @property
    def graph(self) -> TracedGraph:
        """The traced graph that is cut."""
        return self._cache.latest.graph

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The GraphModule of every stage, with the names of its inputs and outputs."""
        return self._cache.latest.stages

    @property
    def schedule(self) -> Schedule:
        """The order of actions of the last step, or of the next one."""
        return step_schedule(self._cache.latest, self.program.n_microbatches // self.program.n_slices)

    @property
    def program(self) -> Program:
        """Every instruction of every device in the last step, or in the next one."""
        if self._last is not None:
            return self._last[0].program
        count = self._cache.decision.expected_microbatches(self._options)
        if self._options.across_batch == "exact":
            return call_executable(self._cache.latest, count, with_backward=True).program
        return step_executable(self._cache.latest, count, self._options.has_target).program

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The pipeline devices, in order."""
        return self._options.devices

    @property
    def dispatch(self) -> str:
        """The dispatch of the program: "inline" or "threads"; "auto" until the second step has decided."""
        return self._dispatcher.choice

    @property
    def measured(self) -> Timeline | None:
        """The timeline of the last step as it ran, in seconds; None before the first, and for one that ran as one CUDA graph."""
        return Timeline.measured(seconds_of(self._last[1]), len(self.devices)) if self._last and self._last[1] else None

    def simulate(self) -> Timeline:
        """Return the predicted timeline of a step, in seconds, from the costs in the plan."""
        return self._inspection().simulate()

    def dump(self, directory: str | Path) -> list[Path]:
        """Write every level as a file, and return the paths.

        plan.json, schedule.csv, program.txt, passes.txt (what each pass changed, and why each message and free is where it is),
        phases.txt (seconds), timeline.json (for Perfetto), timeline.svg, graph.txt, graph.py, graph.dot and report.html.
        """
        return self._inspection().dump(directory)

    def report(self, path: str | Path = "report.html") -> Path:
        """Write one HTML page that needs no network, and return its path.

        The page has the table of stages with predicted beside measured seconds, the memory of each device by kind, both timelines,
        the cut with its skips, what to improve first, and what other numbers of devices and micro-batches and schedules would take.
        """
        return self._inspection().write_report(path)

    def draw(self, path: str | Path | None = None) -> StagePicture:
        """Return a picture of stages, devices and what crosses each cut: `str` is SVG, a notebook shows it. `path` also gets the SVG."""
        return self._inspection().draw(path)

    def explain(self) -> Recordings:
        """Return the recordings that are kept: inputs, mode, guards, nodes, seconds to trace, calls; hits and evictions."""
        return self._cache.explain()

    def _inspection(self) -> Inspection:
        latest = self._cache.latest
        return Inspection(
            title=type(self.model).__name__, plan=self.plan, problem=self.problem, graph=latest.graph, schedule=self.schedule,
            program=self.program, measured=self.measured, links=self._options.links, is_overlapped=latest.is_overlapped,
            is_written=isinstance(self._options.schedule, WrittenProgram), passes=self._options.passes, phases=str(latest.log),
            dispatch=self.dispatch, optimizer_state=self._options.optimizer_state, memory_limit=self._options.memory_limit,
            samples=self._samples, is_one_graph=self._options.cuda_graphs == "step",
        )  # fmt: skip

    def __str__(self) -> str:
        return render(StageTable(self.plan, self.simulate())) if self._cache else repr(self)

    def _repr_html_(self) -> str:
        return pipeline_html(self.plan, self.simulate()) if self._cache else f"<code>{self!r}</code>"

    def __repr__(self) -> str:
        state = "compiled" if self._cache else "compiles at the first call"
        return f"Pipeline({type(self.model).__name__}, n_stages={self._options.n_stages}, {state})"

    def _forget(self) -> None:
        self._cache.clear()

    def _place_names(self) -> str:
        places = self._cache.latest.plan.placement if self._cache else ()
        return ", ".join(f"stage {stage}: {self._options.devices[device]}" for stage, device in enumerate(places))


def _copied(model: nn.Module, options: Options, decision: Decision) -> Pipeline:
    pipe = Pipeline(model, options)
    pipe._cache.decision = decision  # noqa: SLF001 the constructor of a copy
    return pipe
