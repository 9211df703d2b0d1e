"""Stages as CUDA graphs: the kernels of a stage are captured once per slot and signature of inputs, and then replayed.

    run 1   0F0 0F1 0B0 0F2 ...                            uncaptured: warms up
    run 2   0F0, captured [slot 0]  0F1, captured [slot 1]  0B0, captured [slot 0]  0F2, replayed [slot 0] ...

A slot holds one micro-batch in flight, so a graph is not replayed before the backward of its last replay. A stage that cannot
be captured runs uncaptured, and a warning names the reason. Python code of layers and of the loss runs during the capture only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from pipecompile.errors import RecordingWarning
from pipecompile.graph.cross_sample import is_synchronized
from pipecompile.graph.stages import Stage
from pipecompile.runtime.cells.forward_backward import Function
from pipecompile.runtime.cells.stage_cells import Cell
from pipecompile.runtime.cuda_graphs import capture as captures
from pipecompile.runtime.cuda_graphs.capture import GraphCapture
from pipecompile.runtime.cuda_graphs.replay import CapturedStage, summary_of
from pipecompile.runtime.cuda_graphs.weight_aliases import WeightAliases
from pipecompile.runtime.cuda_graphs.weight_gradients import WeightGradients
from pipecompile.torch_private import pytree
from pipecompile.torch_private.autograd_engine import saved_tensor_hooks
from pipecompile.torch_private.kernel_settings import captured_settings
from pipecompile.torch_private.modules import has_any_global_hook, is_hooked
from pipecompile.tracing.node_facts import has_regions
from pipecompile.tracing.user_source import warn

__all__ = ["MAX_RECAPTURES", "MAX_SIGNATURES", "StageGraphs", "leaf_signature", "with_cuda_graphs"]

MAX_SIGNATURES = 4
"""Signatures of inputs that a stage is captured for. Each takes memory; most stages have 1, or 2 where batches are uneven."""

MAX_RECAPTURES = 3
"""Times that a stage is captured anew because its weights moved or were frozen. After that it runs uncaptured."""


def with_cuda_graphs(cells: Sequence[Cell], stages: Sequence[Stage], devices: Sequence[torch.device]) -> list[Cell]:
    """Return the cells of one program, captured from its second run on. Cells on devices without graphs stay as they are."""
    users = Counter(key for cell in cells for key in cell.parameters)
    shared = frozenset(key for key, count in users.items() if count > 1)
    captured = []
    for cell, stage, device in zip(cells, stages, devices, strict=True):
        make = captures.graph_captures(device)
        captured.append(cell if make is None else replace(cell, code=StageGraphs(cell, stage, device, make, shared)))
    return captured


class StageGraphs:
    """Code of a cell that replays CUDA graphs. `reason` says why the stage runs uncaptured; None while it can be captured.

    _first_run    signature ──► run in which it was seen first: that run rehearses, the next captures
    _captured     (slot, signature) ──► graphs
    _settings     what decides in the present run which kernels a graph would contain
    memory        (address, requires_grad) of weights and buffers; graphs contain the addresses
    _sums         gradients of weights, added inside the graphs of all slots
    _shared       ids of the weights that other stages use, too: another thread may run with them during a capture
    """

    def __init__(
        self,
        cell: Cell,
        stage: Stage,
        device: torch.device,
        make: Callable[[], GraphCapture],
        shared: frozenset[int] = frozenset(),
    ) -> None:
        self.cell, self.stage, self.device, self.new_capture = cell, stage, device, make
        self.uncaptured, self._shared = cell.code.for_slot(None), shared
        self.reason: str | None = None
        self._runs, self.has_hooks, self._is_full = 0, False, False
        self._settings = captured_settings()
        self._recaptures, self.memory = 0, list[tuple[int, bool]]()
        self._sums = WeightGradients()
        self._first_run: dict[Any, int] = {}
        self._captured: dict[tuple[int | None, Any], CapturedStage] = {}
        self._layers = _called_layers(stage.module)
        if (reason := _obstacle(stage, cell)) is not None:
            self._refuse(reason)

    def refresh(self) -> None:
        """Before a run, drop the graphs if weights or buffers moved, and suspend replays if hooks would be passed over."""
        self.cell.code.refresh()
        self._settings = captured_settings()
        had_hooks, self.has_hooks = self.has_hooks, _has_hooks(self._layers)
        tensors = (*self.stage.module.parameters(), *self.stage.module.buffers())
        before, self.memory = self.memory, [(tensor.data_ptr(), tensor.requires_grad) for tensor in tensors]
        if self.reason is not None:
            return
        self._runs += 1
        if before != self.memory:
            self._recaptures += bool(self._captured)
            self._captured.clear()
            self._sums = WeightGradients()
            if self._recaptures > MAX_RECAPTURES:
                self._refuse("its weights are in other memory again and again")
        if self.has_hooks and not had_hooks:
            self._warn("runs without CUDA graphs as long as there are hooks on its layers, or on what autograd saves")

    def for_slot(self, slot: int | None, *, stays: bool = True) -> Function:
        """Return the function for micro-batches in this slot; None for those whose state is not kept.

        Refuse graphs if what a forward saves does not stay in the slot: a graph has it in memory of its own.
        """
        if not stays and self.reason is None:
            self._refuse("what its forwards save is copied to the host")

        def run(*values: Any) -> Sequence[Any]:
            if self.reason is not None or self.has_hooks:
                return self.uncaptured(*values)
            leaves, spec = pytree.tree_flatten(values)
            leaf_signatures = [leaf_signature(leaf, self.device) for leaf in leaves]
            modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), self._settings
            signature = (spec, *modes, *leaf_signatures)
            if None in leaf_signatures:
                kind = type(leaves[leaf_signatures.index(None)]).__name__
                self._refuse(f"it is given a {kind} that a graph cannot be")
            elif (slot, signature) in self._captured:
                return self._captured[slot, signature].run(leaves)
            elif self._is_admitted(signature):
                if self._first_run[signature] == self._runs:
                    return self._rehearsed(values)
                if self._capture(slot, signature, leaves, spec):
                    return self._captured[slot, signature].run(leaves)
            return self.uncaptured(*values)

        return run

    def _is_admitted(self, signature: Any) -> bool:
        """Return whether the signature is one of the first MAX_SIGNATURES. Warn once of another."""
        if signature not in self._first_run and len(self._first_run) < MAX_SIGNATURES:
            self._first_run[signature] = self._runs
        elif signature not in self._first_run and not self._is_full:
            self._is_full = True
            self._warn(f"runs without CUDA graphs for more than {MAX_SIGNATURES} kinds of inputs (shapes, numbers)")
        return signature in self._first_run

    def _rehearsed(self, values: Sequence[Any]) -> Sequence[Any]:
        result, reason = self.new_capture().rehearse(lambda: self.uncaptured(*values))
        if reason is not None:
            self._refuse(reason)
        return result

    def _capture(self, slot: int | None, signature: Any, leaves: list[Any], spec: pytree.TreeSpec) -> bool:
        is_compiled = not getattr(getattr(self.cell.code, "stage", self.cell.code), "layers", ())
        aliases = WeightAliases(None if is_compiled else self.stage.module, self._shared)
        try:
            captured = CapturedStage(
                self.uncaptured, self.new_capture(), leaves, spec, self._refuse, aliases, self._sums
            )
            self._captured[slot, signature] = captured
        except Exception as error:
            self._refuse(summary_of(error))
        return self.reason is None

    def _refuse(self, reason: str) -> None:
        self.reason = reason
        self._warn(f"runs without CUDA graphs: {reason}")

    def _warn(self, what: str) -> None:
        warn(f"stage {self.stage.index} {what}", RecordingWarning)


def leaf_signature(leaf: Any, device: torch.device) -> Any:
    """Return the part of a leaf that a graph depends on; None if the leaf is neither copied into static memory nor a plain value."""
    if isinstance(leaf, torch.Tensor):
        is_plain = type(leaf) in (torch.Tensor, nn.Parameter) and leaf.layout is torch.strided
        return (
            (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad) if is_plain and leaf.device == device else None
        )
    return (type(leaf), leaf) if isinstance(leaf, _PLAIN) or leaf is None else None


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def _called_layers(module: fx.GraphModule) -> list[nn.Module]:
    """Return the layers that the stage calls, and the layers inside them."""
    targets = dict.fromkeys(str(node.target) for node in module.graph.nodes if node.op == "call_module")
    return [layer for target in targets for layer in module.get_submodule(target).modules()]


def _has_hooks(layers: Sequence[nn.Module]) -> bool:
    """Return whether a replay would pass over hooks."""
    return has_any_global_hook() or saved_tensor_hooks() is not None or any(map(is_hooked, layers))


def _obstacle(stage: Stage, cell: Cell) -> str | None:
    """Return why replays would differ from runs of the stage, or None."""
    if cell.effects.written_inputs:
        return "it writes into its inputs"
    if has_regions(stage.module.graph.nodes):
        return "a region of the model's own checkpointing is recomputed by Python, in every backward"
    for layer in _called_layers(stage.module):
        if isinstance(layer, nn.SyncBatchNorm) and is_synchronized(layer):
            return "SyncBatchNorm waits for other processes"
        if type(layer).__module__.startswith(_OWN_MODULES):
            return f"Python runs in {type(layer).__name__}, every time"
    for node in stage.module.graph.nodes:
        module = str(getattr(node.target, "__module__", ""))
        if node.op == "call_function" and module.startswith(_OWN_MODULES) and module not in _REPLAYABLE:
            return f"Python runs at {node.name}, every time"
    return None


_OWN_MODULES = "pipecompile."

_REPLAYABLE = ("pipecompile.tracing.ambient_modes", "pipecompile.tracing.emit.value_nodes")
"""Own modules whose functions launch the same kernels in each run."""
