"""Whole steps as CUDA graphs: where all stages share one GPU, all launches of a step are one.

    step 1   uncaptured, in order on one stream: a rehearsal, which finds waits of the host and the tensors that get gradients
    step 2   captured, and replayed         step 3 ...   replayed: one launch, no Python of the model, no autograd

A step that cannot be one graph runs with a pair of graphs for each stage and slot (`stage_graphs.py`), and a warning says why. Everything
that may change from step to step is looked at before each replay: kinds of inputs, modes, weights that moved or froze, hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from pipecompile.errors import RecordingWarning
from pipecompile.ir import Kind, Program
from pipecompile.runtime.cells.stage_cells import Cell
from pipecompile.runtime.cuda_graphs.capture import GraphCapture
from pipecompile.runtime.cuda_graphs.captured_step import CapturedStep, UncapturableError, run_in_order
from pipecompile.runtime.cuda_graphs.stage_graphs import MAX_RECAPTURES, MAX_SIGNATURES, StageGraphs
from pipecompile.runtime.cuda_graphs.static_arrivals import Arrivals
from pipecompile.runtime.cuda_graphs.step_code import StepCode
from pipecompile.runtime.cuda_graphs.step_gradients import StepGradients
from pipecompile.runtime.registers import Frame
from pipecompile.runtime.run_errors import Peaks
from pipecompile.runtime.transport import Upload
from pipecompile.text.units import BYTES, written
from pipecompile.torch_private.accelerators import is_accelerator
from pipecompile.torch_private.autograd_engine import (
    gradient_hook_tables,
    hooks_registered,
    is_accumulation_held,
)
from pipecompile.torch_private.kernel_settings import captured_settings
from pipecompile.tracing.ambient_modes import Ambient
from pipecompile.tracing.user_source import warn

__all__ = ["StepGraphs", "step_obstacle"]


class StepGraphs:
    """The graphs of one program. `reason` says why the program is not captured as a whole; None while it can be.

    _captured     signature ──► graphs; all share one memory pool, since one is replayed at a time and leaves nothing in it
    _rehearsed    signature ──► the tensors that got gradients in its first run
    _memory       (address, requires_grad) of weights and buffers; graphs contain the addresses
    _hook_count   number of hooks that had been registered when there was none on a weight
    """

    def __init__(
        self, program: Program, cells: Sequence[Cell], devices: Sequence[torch.device], peaks: Peaks | None = None
    ) -> None:
        self.peaks = peaks
        self.stages = [cell.code for cell in cells if isinstance(cell.code, StageGraphs)]
        self.is_split = any(one.action and one.action.kind is Kind.INPUT_GRAD for row in program.rows for one in row)
        self.reason: str | None = None
        self._runs, self._recaptures, self._hook_count, self._told = 0, 0, -1, set[str]()
        self._memory = list[list[tuple[int, bool]]]()
        if (reason := step_obstacle(program, cells, devices)) is not None:
            self._refuse(reason)
            return
        plain = [replace(cell, code=stage.cell.code) for cell, stage in zip(cells, self.stages, strict=True)]
        self.device, self.code, self.upload = devices[0], StepCode(program, plain, devices), Upload(devices[0])
        self._forget()

    def _forget(self) -> None:
        """Drop all graphs. Their memory pool goes with them."""
        self._captured: dict[Any, CapturedStep] = {}
        self._rehearsed: dict[Any, list[torch.Tensor]] = {}
        self._capture: GraphCapture | None = None
        self._sums = StepGradients()

    def run(self, frame: Frame) -> bool:
        """Run a step on the frame as one graph, or as the rehearsal of one. Return False, with nothing done, if it cannot be one."""
        if self.reason is not None or frame.recordings or any(stage.has_hooks for stage in self.stages):
            return False
        given = Arrivals.of(frame.arrivals)
        if given.unfit:
            self._refuse(f"a {given.unfit} arrives, which a graph cannot take")
            return False
        modes = Ambient.now(), captured_settings(), torch.is_inference_mode_enabled()
        signature = *modes, frame.sizes, given.signature
        self._look_at_memory(signature)
        if self.reason is not None or not self._is_admitted(signature):
            return False
        tensors = [self.upload.send(tensor) for tensor in given.tensors]
        if signature not in self._rehearsed:
            self._rehearse(signature, frame, given.filled(tensors))
            return True
        leaves = self._rehearsed[signature]
        return not self._is_suspended(leaves) and self._replay(signature, frame, given, tensors)

    def _look_at_memory(self, signature: Any) -> None:
        """Drop the graphs if weights or buffers moved or froze, and refuse if that happens again and again."""
        memory = [stage.memory for stage in self.stages]
        captured = self._captured.get(signature)
        if memory == self._memory and (captured is None or captured.is_current):
            return
        self._memory = memory
        self._recaptures += bool(self._captured)
        self._forget()
        if self._recaptures > MAX_RECAPTURES:
            self._refuse("weights are in other memory again and again")

    def _is_admitted(self, signature: Any) -> bool:
        """Return whether the signature is one of the first MAX_SIGNATURES. Warn once of another."""
        if signature in self._rehearsed or len(self._rehearsed) < MAX_SIGNATURES:
            return True
        self._tell(f"for more than {MAX_SIGNATURES} kinds of inputs (shapes, numbers)")
        return False

    def _is_suspended(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Return whether a replay would do other than autograd: gradients are sparse, or have hooks. Looks for hooks only if one was
        registered since there was none.
        """
        if not self._sums.serves(leaves):
            self._tell("as long as gradients are sparse, or of another dtype than their weights")
            return True
        if (count := hooks_registered()) == self._hook_count:
            return False
        if any(map(gradient_hook_tables, leaves)):
            self._tell("as long as there are hooks on gradients of weights")
            return True
        if any(map(is_accumulation_held, leaves)):
            self._tell("as long as something holds the autograd node that adds to the gradient of a weight")
            return True
        self._hook_count = count
        return False

    def _rehearse(self, signature: Any, frame: Frame, arrivals: dict[tuple[str, bool], Any]) -> None:
        """Run uncaptured. Note the tensors that get gradients; refuse if the host waits for the device."""
        self.code.leaves.clear()
        own = self.code.new_frame(frame)
        departures, reason = self._new_capture().rehearse(lambda: run_in_order(self.code, own, arrivals))
        frame.departures.update(departures)
        self._rehearsed[signature] = [*self.code.leaves.values()]
        self.code.leaves.clear()
        if reason is not None:
            self._refuse(reason)

    def _replay(self, signature: Any, frame: Frame, given: Arrivals, tensors: Sequence[torch.Tensor]) -> bool:
        """Capture the step unless it is, and replay it. Return False, with nothing done, if it cannot be captured."""
        try:
            if signature not in self._captured:
                if is_accelerator(self.device):
                    torch.accelerator.empty_cache()  # of the rehearsal: a capture cannot free what torch keeps
                uploaded = replace(given, tensors=tensors)
                leaves = self._rehearsed[signature]
                self._captured[signature] = CapturedStep(
                    self.code, self._new_capture(), uploaded, frame, leaves, self._sums
                )
            self._captured[signature].run(frame, tensors)
        except UncapturableError as error:
            self._refuse(f"{error}{self._prediction(error)}")
        return self.reason is None

    def _prediction(self, error: UncapturableError) -> str:
        """Return the predicted bytes of the graph if the capture ran out of memory."""
        cause = getattr(error.__cause__, "error", error.__cause__)
        if self.peaks is None or not isinstance(cause, torch.OutOfMemoryError):
            return ""
        return f". The graph was predicted to hold {written(BYTES, sum(self.peaks()))} with the parameters"

    def _new_capture(self) -> GraphCapture:
        """Return the capture of all graphs that live now, which share its memory pool."""
        self._capture = self._capture or self.stages[0].new_capture()
        return self._capture

    def _refuse(self, reason: str) -> None:
        self.reason = reason
        self._forget()
        split = ", each computes all gradients of a micro-batch in I" if self.is_split else ""
        warn(f"the step is not one CUDA graph: {reason}. Its stages are captured one by one{split}", RecordingWarning)

    def _tell(self, when: str) -> None:
        if when not in self._told:
            self._told.add(when)
            warn(f"the step is not one CUDA graph {when}: its stages are captured one by one then", RecordingWarning)


def step_obstacle(program: Program, cells: Sequence[Cell], devices: Sequence[torch.device]) -> str | None:
    """Return why a program cannot be one graph, or None."""
    if len(homes := dict.fromkeys(devices)) > 1:
        return f"its stages are on {', '.join(map(str, homes))}, and a graph is captured on one GPU"
    for index, cell in enumerate(cells):
        if isinstance(cell.code, StageGraphs) and cell.code.reason is not None:
            return f"in stage {index}, {cell.code.reason}"
    for action in (one.action for row in program.rows for one in row):
        if action is not None and action.kind is Kind.OFFLOAD:
            return "what forwards save is copied to the host"
        if action is not None and action.kind is Kind.RECOMPUTE and cells[action.stage].effects.has_drawn:
            return (
                f"stage {action.stage} draws random numbers and is recomputed, for which the host reads the generator"
            )
    return None
