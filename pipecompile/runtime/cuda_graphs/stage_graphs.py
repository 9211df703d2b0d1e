"""Stages as CUDA graphs: what a stage launches is captured once per slot and kind of inputs, and then replayed.

    run 1   0F0 0F1 0B0 0F2 ...                            as it is: it warms up
    run 2   0F0, captured [slot 0]  0F1, captured [slot 1]  0B0, captured [slot 0]  0F2, replayed [slot 0] ...

A slot is one micro-batch in flight, so none is replayed before its backward. A stage that cannot be captured runs as it is, and
a warning says why. Python of layers and of the loss runs when a stage is captured, and not again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from pipecompile.errors import RecordingWarning
from pipecompile.graph.stages import Stage
from pipecompile.runtime.cells.deferred_batchnorm import speaks
from pipecompile.runtime.cuda_graphs import capture as tapes
from pipecompile.runtime.cuda_graphs.capture import Tape
from pipecompile.runtime.cuda_graphs.replay import Captured, Function, said
from pipecompile.runtime.interpreter import Cell
from pipecompile.torch_private import pytree
from pipecompile.torch_private.autograd_engine import saved_tensor_hooks
from pipecompile.torch_private.modules import has_any_global_hook, is_hooked

__all__ = ["graphed"]

KINDS = 4
"""Of inputs that a stage is captured for. Each has memory of its own, and most have one, or two where batches are uneven."""

MOVES = 3
"""So often weights may move, or be frozen, after the stage was captured: each time it is captured anew."""


def graphed(cells: Sequence[Cell], stages: Sequence[Stage], devices: Sequence[torch.device]) -> list[Cell]:
    """The cells of one program, captured from its second run on."""
    found = []
    for cell, stage, device in zip(cells, stages, devices, strict=True):
        if (make := tapes.tapes_on(device)) is not None:
            graphs = StageGraphs(cell, stage, device, make)
            cell = replace(cell, look=graphs.look, slots=graphs.at)  # noqa: PLW2901
        found.append(cell)
    return found


class StageGraphs:
    """`reason` is why the stage runs as it is; None as long as it can be captured."""

    def __init__(self, cell: Cell, stage: Stage, device: torch.device, make: Callable[[], Tape]) -> None:
        self.cell, self.stage, self.device, self.tape = cell, stage, device, make
        self.reason: str | None = None
        self._runs, self._is_watched, self._is_full = 0, False, False
        self._moves, self._memory = 0, list[tuple[int, bool]]()
        self._first: dict[Any, int] = {}
        self._captured: dict[tuple[int | None, Any], Captured] = {}
        self._layers = _called(stage.module)
        if (reason := _against(stage, cell)) is not None:
            self._refuse(reason)

    def look(self) -> None:
        """Before a run: are weights and buffers where they were, and does nobody watch the layers?"""
        self.cell.look()
        if self.reason is not None:
            return
        self._runs += 1
        tensors = (*self.stage.module.parameters(), *self.stage.module.buffers())
        memory = [(tensor.data_ptr(), tensor.requires_grad) for tensor in tensors]
        if memory != self._memory:
            self._memory = memory
            self._moves += bool(self._captured)
            self._captured.clear()
            if self._moves > MOVES:
                self._refuse("its weights are in other memory again and again")
        if (is_watched := _is_watched(self._layers)) and not self._is_watched:
            self._warn("runs without CUDA graphs as long as there are hooks on its layers, or on what autograd saves")
        self._is_watched = is_watched

    def at(self, slot: int | None) -> Function:
        """The stage for micro-batches in this slot; None for those of which nothing is kept."""

        def run(*values: Any) -> Sequence[Any]:
            if self.reason is not None or self._is_watched:
                return self.cell.function(*values)
            leaves, spec = pytree.tree_flatten(values)
            marks = [_mark(leaf, self.device) for leaf in leaves]
            kind = (spec, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *marks)
            if None in marks:
                self._refuse(f"it is given a {type(leaves[marks.index(None)]).__name__} that a graph cannot be")
            elif (slot, kind) in self._captured:
                return self._captured[slot, kind].run(leaves)
            elif self._is_known(kind):
                if self._first[kind] == self._runs:
                    return self._rehearsed(values)
                if self._capture(slot, kind, leaves, spec):
                    return self._captured[slot, kind].run(leaves)
            return self.cell.function(*values)

        return run

    def _is_known(self, kind: Any) -> bool:
        """Is there room for graphs of this kind?"""
        if kind not in self._first and len(self._first) < KINDS:
            self._first[kind] = self._runs
        elif kind not in self._first and not self._is_full:
            self._is_full = True
            self._warn(f"runs without CUDA graphs for more than {KINDS} kinds of inputs (shapes, numbers)")
        return kind in self._first

    def _rehearsed(self, values: Sequence[Any]) -> Sequence[Any]:
        made, reason = self.tape().rehearse(lambda: self.cell.function(*values))
        if reason is not None:
            self._refuse(reason)
        return made

    def _capture(self, slot: int | None, kind: Any, leaves: list[Any], spec: pytree.TreeSpec) -> bool:
        try:
            self._captured[slot, kind] = Captured(self.cell.function, self.tape(), leaves, spec, self._refuse)
        except Exception as error:
            self._refuse(said(error))
        return self.reason is None

    def _refuse(self, reason: str) -> None:
        self.reason = reason
        self._warn(f"runs without CUDA graphs: {reason}")

    def _warn(self, what: str) -> None:
        warnings.warn(f"stage {self.stage.index} {what}", RecordingWarning, stacklevel=2)


def _mark(leaf: Any, device: torch.device) -> Any:
    """What a graph depends on; None for what cannot be copied into its memory, and is no plain value."""
    if isinstance(leaf, torch.Tensor):
        is_plain = type(leaf) in (torch.Tensor, nn.Parameter) and leaf.layout is torch.strided
        return (
            (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad) if is_plain and leaf.device == device else None
        )
    return (type(leaf), leaf) if isinstance(leaf, _PLAIN) or leaf is None else None


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def _called(module: fx.GraphModule) -> list[nn.Module]:
    """The layers that the stage calls, and those in them."""
    targets = dict.fromkeys(str(node.target) for node in module.graph.nodes if node.op == "call_module")
    return [layer for target in targets for layer in module.get_submodule(target).modules()]


def _is_watched(layers: Sequence[nn.Module]) -> bool:
    """Would a replay pass over hooks?"""
    if has_any_global_hook() or saved_tensor_hooks() is not None:
        return True
    return any(map(is_hooked, layers))


def _against(stage: Stage, cell: Cell) -> str | None:
    """Why replays would not do what the stage does."""
    if cell.prints.inputs:
        return "it writes into its inputs"
    for layer in _called(stage.module):
        if isinstance(layer, nn.SyncBatchNorm) and speaks(layer):
            return "SyncBatchNorm waits for other processes"
        if type(layer).__module__.startswith(_OURS):
            return f"Python runs in {type(layer).__name__}, every time"
    for node in stage.module.graph.nodes:
        made_by = str(getattr(node.target, "__module__", ""))
        if node.op == "call_function" and made_by.startswith(_OURS) and made_by not in _HARMLESS:
            return f"Python runs at {node.name}, every time"
    return None


_OURS = "pipecompile."

_HARMLESS = ("pipecompile.tracing.ambient_modes", "pipecompile.tracing.emit.value_nodes")
"""Whose functions do the same every time."""
