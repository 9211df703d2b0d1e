"""Steps and calls on micro-batches that the user has made: `step(microbatches=[...])`, `pipe(microbatches=[...])`.

list ─► a recording for each kind of micro-batch ─► one program ─► loss, gradients; outputs, one per micro-batch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipecompile.batching.call_inputs import flatten
from pipecompile.batching.microbatch_list import ListedBatch, MicrobatchList, is_list_asked, read_microbatches
from pipecompile.batching.microbatches import weighted_loss
from pipecompile.batching.packed_split import split_call
from pipecompile.driver.compile_cache import CompileCache
from pipecompile.driver.joined_outputs import joined_output, joined_rules
from pipecompile.driver.listed_programs import ListedProgram
from pipecompile.driver.listed_weights import listed_weights
from pipecompile.driver.loss_reads import refuse_in_list
from pipecompile.driver.specialization import Specialization
from pipecompile.driver.step_arrivals import Arrivals, add_loss_gradients, check_target
from pipecompile.errors import InputError
from pipecompile.ir import AUX, LOSS, TARGET
from pipecompile.runtime.autograd_call import run_with_autograd
from pipecompile.runtime.dispatch import Dispatcher
from pipecompile.runtime.executable import Executable
from pipecompile.runtime.listed_call import ListedCall, ListedPorts
from pipecompile.runtime.registers import Frame, Spans
from pipecompile.runtime.results import without_backward
from pipecompile.settings.exclusions import EXCLUDED_BY_SLICES
from pipecompile.tracing.guards.state_guards import ReadChange

__all__ = ["ListedSteps", "refuse_others"]


def refuse_others(args: tuple[Any, ...], **others: Any) -> None:
    """Raise InputError for arguments that are given together with `microbatches`."""
    given = ["arguments"] * bool(args) + [name for name, value in others.items() if value is not None]
    if given:
        raise InputError(
            f"microbatches is given together with {' and '.join(given)}",
            why="every micro-batch has arguments and a target of its own",
            hint='step(microbatches=[{"x": x, "target": y}, ...])',
        )


Last = tuple[Executable, Spans] | None
"""The executable of the last training step, and the times of its instructions."""


@dataclass(frozen=True, slots=True)
class ListedSteps:
    """Runs of one pipeline on lists of micro-batches."""

    model: nn.Module
    cache: CompileCache
    dispatcher: Dispatcher

    def of_step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, entries: Any, *, is_example: bool = False
    ) -> MicrobatchList | None:
        """Return the user's list, or the parts of a mini-batch that `split` divides; None for another call. Raise InputError."""
        options = self.cache.options
        if entries is None:
            return self._split(args, kwargs, target)
        refuse_others(args, target=target, **kwargs)
        if options.across_batch == "exact":
            raise InputError(
                'microbatches is given, and the pipeline was compiled with across_batch="exact"',
                why="a list of micro-batches has no order of samples, in which their outputs could be joined",
                hint="step(x, target=y), a mini-batch",
            )
        if options.n_slices > 1:
            raise InputError(
                "microbatches is given, and the schedule divides sequences into slices",
                why=EXCLUDED_BY_SLICES["split"],
                hint="step(x, target=y), a mini-batch",
            )
        with_target = options.is_target_required
        return read_microbatches(
            self.model.forward, entries, options.batch_dims,
            with_target=with_target, is_step=True, is_example=is_example,
        )  # fmt: skip

    def of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MicrobatchList | None:
        """Return the list of a call, as for a step but without targets."""
        if not is_list_asked(self.model.forward, kwargs):
            return self._split(args, kwargs, None)
        refuse_others(args, **{name: value for name, value in kwargs.items() if name != "microbatches"})
        entries, dims = kwargs["microbatches"], self.cache.options.batch_dims
        return read_microbatches(self.model.forward, entries, dims, with_target=False, is_step=False)

    def of_example(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MicrobatchList | None:
        """Return the list of an example, whose entries may lack targets."""
        if not is_list_asked(self.model.forward, kwargs):
            return self._split(args, kwargs, None)
        others = {name: value for name, value in kwargs.items() if name != "microbatches"}
        return self.of_step(args, others, None, kwargs["microbatches"], is_example=True)

    def samples_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Return the samples of a call, None without a batch."""
        listed = self.of_example(args, kwargs)
        if listed is not None:
            return sum(listed.sizes)
        return flatten(self.model.forward, args, kwargs, self.cache.options.batch_dims).samples

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> MicrobatchList | None:
        options, forward = self.cache.options, self.model.forward
        if not options.split:
            return None
        dims, count = options.batch_dims, options.default_microbatches
        return split_call(forward, args, kwargs, target, options.split, dims, count)

    # -- a step -----------------------------------------------------------------------------------------------------

    def step(
        self, listed: MicrobatchList, scaler: torch.amp.GradScaler | None, last: Last
    ) -> tuple[torch.Tensor, list[Any] | None, Last]:
        """Run forward and backward of all micro-batches under the schedule; gradients are added to `.grad`.

        Return the loss, what `loss_fn` returned beside it, and the last training step: this one, or `last`.
        """
        options = self.cache.options
        trains = options.is_training_now
        with torch.set_grad_enabled(trains):
            recordings = self.cache.find_listed(listed)
        self.cache.check_values()
        self.cache.context.warnings.drop_delayed()
        for one in recordings:
            one.require_loss(listed.has_targets)
        refuse_in_list(recordings, listed.sizes, listed.targets)
        check_target(listed.targets, options)
        kind = "step" if trains == options.has_backward else "loss"
        program = self.cache.listed.step(recordings, with_target=listed.has_targets, kind=kind)
        ports = ListedPorts(program.recordings, [one.inputs for one in recordings], program.name, listed.calls)
        arrivals, weights = self._arrivals(recordings, listed, ports, scaler)
        with torch.set_grad_enabled(trains):
            self._check(recordings, listed, is_step=True)
            frame = self._run(program, listed.sizes, arrivals)
        losses, aux = frame.departures[LOSS, False], frame.departures.get((AUX, False))
        ports.return_gradients(frame)
        self._finish(program, frame)
        if kind == "step":
            self.dispatcher.settle(frame.spans, is_ordered=program.executable.is_ordered)
        self.cache.context.check_losses(losses, _changed(recordings), trains=trains)
        this = (program.executable, frame.spans) if kind == "step" else last
        return without_backward(weighted_loss(losses, weights)), aux, this

    def _arrivals(
        self,
        recordings: Sequence[Specialization],
        listed: MicrobatchList,
        ports: ListedPorts,
        scaler: torch.amp.GradScaler | None,
    ) -> tuple[Arrivals, Sequence[float]]:
        """Return what arrives from the host, and the weights of the losses."""
        arrivals = ports.arrivals([call.leaves for call in listed.calls])
        if listed.has_targets:
            arrivals[TARGET, False] = listed.targets
        own = listed_weights(recordings, listed, self.cache.options, self.cache.context)
        return arrivals, add_loss_gradients(self.cache, recordings[0], arrivals, own, scaler)

    def _run(self, program: ListedProgram, sizes: tuple[int, ...], arrivals: Arrivals) -> Frame:
        executable = program.executable
        threaded = self.dispatcher.is_threaded(is_ordered=executable.is_ordered_now())
        frame = executable.frame(sizes, arrivals, threaded=threaded)
        frame.recordings = program.recordings
        executable.run(executable.code(threaded=threaded), frame, self.dispatcher.workers(threaded=threaded))
        self.cache.context.warnings.drawn(executable.draw_warning(threaded=threaded))
        return frame

    def _finish(self, program: ListedProgram, frame: Frame) -> None:
        executable = program.executable
        executable.finished(frame, threaded=self.dispatcher.is_threaded(is_ordered=executable.is_ordered))

    def _check(self, recordings: Sequence[Specialization], listed: MicrobatchList, *, is_step: bool) -> None:
        """Compare each recording with the model itself on its first micro-batch, if that is due."""
        checked: set[int] = set()
        for one, call, target in zip(recordings, listed.calls, listed.targets, strict=True):
            if one.number in checked:
                continue
            checked.add(one.number)
            arrivals: Mapping[tuple[str, bool], Any] | None = None
            if is_step:
                arrivals = {(TARGET, False): [target]} if listed.has_targets else {(LOSS, True): [None]}
            self.cache.check(one, ListedBatch((call,)), arrivals)

    # -- a call -----------------------------------------------------------------------------------------------------

    def call(self, listed: MicrobatchList) -> Any:
        """Return the model's output for each micro-batch; of the parts of one mini-batch, put together."""
        recordings = self.cache.find_listed(listed)
        rules = joined_rules(recordings) if listed.is_split else ()
        self.cache.check_values()
        tensors = [leaf for call in listed.calls for leaf in call.tensors]
        with_backward = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *self.model.parameters()))
        program = self.cache.listed.call(recordings, with_backward=with_backward)
        ports = ListedPorts(program.recordings, [one.inputs for one in recordings], program.name, listed.calls)
        self._check(recordings, listed, is_step=False)
        outputs = [one.outputs for one in recordings]
        call = ListedCall(program.executable, ports, outputs, listed.sizes)
        if with_backward:
            values = run_with_autograd(call)
        else:
            frame = call.begin([one.leaves for one in listed.calls])
            program.executable.run(program.executable.inline, frame)
            values = call.results(frame)
            program.executable.finished(frame)
        pairs = zip(outputs, values, listed.sizes, strict=True)
        made = [output.assemble(own.__getitem__, size) for output, own, size in pairs]
        return joined_output(made, rules, listed.sizes) if listed.is_split else made


def _changed(recordings: Sequence[Specialization]) -> list[ReadChange]:
    """Return what a step has changed of the state that these recordings read."""
    different = {id(one): one for one in recordings}
    return [change for one in different.values() for change in one.changed_by_run()]
