"""Tensors that stages store on objects and the loss reads: their gradients go back to the stages that computed them.

    0F0   self.aux = a                          a belongs to the graph of 0F0
    1F0   self.aux = leaf; loss; self.aux = a   the leaf has the values of a
    1B0   leaf.grad
    0B0   from the outputs, and from a with leaf.grad

Effect nodes, hooks of layers and pieces kept whole store such tensors in attributes, lists and dicts. Each cell has its own autograd
graph, so a loss that read `a` itself would run a backward through the graph of another cell. With recomputation, that is not even the
graph whose leaves pass gradients to earlier stages. If a stage has run ahead, the loss gets the tensor of its own micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import local
from typing import Any
from weakref import ref

import torch

from pipecompile.runtime.cells.forward_backward import Function, SavedGraph, edge_of
from pipecompile.runtime.cells.left_gradients import LeftGradients, LeftTensor
from pipecompile.runtime.cells.left_places import LeftPlaces, exchanged
from pipecompile.runtime.cells.stage_cells import Cell
from pipecompile.runtime.cells.variant_cells import VariantCell
from pipecompile.runtime.registers import Frame, Run

__all__ = ["LeftTensors"]


class _Running(local):
    """The frame on which this thread runs a cell."""

    frame: Frame | None = None


class LeftTensors:
    """Takes care of the tensors that the stages of a program leave. `places` has, by stage, where each may leave some; empty if the loss
    reads no objects. The state of a run is in `Frame.left`: (stage, micro-batch) to what its forward has left. Threads take turns:
    no stage leaves a tensor while the loss reads.
    """

    def __init__(self, places: dict[int, LeftPlaces], last: int) -> None:
        self.places, self.last = places, last
        self._running = _Running()

    @classmethod
    def of(cls, cells: Sequence[Cell | VariantCell]) -> LeftTensors:
        """Return what takes care of the tensors that the stages of these cells leave."""
        last, places = len(cells) - 1, dict[int, LeftPlaces]()
        if any(one.reads_objects for cell in cells[-1:] for one in cell.all_cells):
            leaves = {stage: any(one.leaves_values for one in cell.all_effects) for stage, cell in enumerate(cells)}
            places = {stage: LeftPlaces(cells[stage].all_effects) for stage in range(last) if leaves[stage]}
        return cls(places, last)

    def forward(self, run: Run, stage: int) -> Run:
        """Return the function of an F or an R, whose stage finds the frame."""
        if not self._concerns(stage):
            return run

        def run_on(frame: Frame) -> None:
            self._running.frame = frame
            try:
                run(frame)
            finally:
                self._running.frame = None

        return run_on

    def around(self, function: Function, stage: int, microbatch: int) -> Function:
        """Wrap the function of a stage: it notes the tensors that it stores or, in the last stage, reads leaves instead of them."""
        if not self._concerns(stage):
            return function
        return self._reading(function, microbatch) if stage == self.last else self._noting(function, stage, microbatch)

    def backward(self, run: Run, stage: int, microbatch: int, saved: int) -> Run:
        """Return the function of a B or an I, whose saved graph is in the register `saved`."""
        if not self._concerns(stage):
            return run

        def run_with_left(frame: Frame) -> None:
            graph: SavedGraph = frame.registers[saved]
            graph.left = self._gradients(frame, stage, microbatch)
            run(frame)
            if stage != self.last:
                frame.left.pop((stage, microbatch), None)

        return run_with_left

    def _concerns(self, stage: int) -> bool:
        return stage in self.places or (stage == self.last and bool(self.places))

    def _gradients(self, frame: Frame, stage: int, microbatch: int) -> LeftGradients:
        if stage != self.last:
            return LeftGradients(left=frame.left.get((stage, microbatch), []))
        left = [one for other in self.places for one in frame.left.get((other, microbatch), [])]
        return LeftGradients(leaves=[one.leaf for one in left if one.leaf is not None])

    # -- stages before the last -------------------------------------------------------------------------------------

    def _noting(self, function: Function, stage: int, microbatch: int) -> Function:
        places = self.places[stage]

        def noting(*values: Any) -> Sequence[Any]:
            frame = self._running.frame
            if frame is None:
                return function(*values)
            before = {id(one): one for one in places.tensors()}
            results = function(*values)
            new = [one for one in places.tensors() if id(one) not in before]
            self._note(frame, (stage, microbatch), new)
            return results

        return noting

    def _note(self, frame: Frame, key: tuple[int, int], new: list[torch.Tensor]) -> None:
        """Note the tensors that a forward has stored. A recomputation has stored them once more, in another graph."""
        edges = [edge_of(one) if one.requires_grad else None for one in new]
        known = frame.left.get(key)
        if known is None:
            frame.left[key] = [LeftTensor(ref(one), one.detach(), edge) for one, edge in zip(new, edges, strict=True)]
            return
        shapes = [one.values.shape for one in known] == [one.shape for one in new]
        if not shapes and any(one.leaf is not None and one.leaf.grad is not None for one in known):
            raise RuntimeError(
                f"a recomputation left {len(new)} tensors on objects, and its forward {len(known)} others, whose gradients the loss has"
                " computed. Try checkpoint='never'; or return them from forward"
            )
        for one, edge in zip(known if shapes else [], edges, strict=False):
            one.edge = edge

    # -- the last stage ---------------------------------------------------------------------------------------------

    def _reading(self, function: Function, microbatch: int) -> Function:
        def reading(*values: Any) -> Sequence[Any]:
            frame = self._running.frame
            if frame is None or not any(frame.left.values()):
                return function(*values)
            with self._read(frame, microbatch):
                return function(*values)

        return reading

    @contextmanager
    def _read(self, frame: Frame, microbatch: int) -> Iterator[None]:
        """Put leaves in the places of the tensors that this micro-batch, or one that is ahead, has left; and at the end the tensors
        again. `Frame.left` is in the order in which forwards ran: one behind this micro-batch's is ahead, whatever its number.
        """
        own = {stage: [one.shown() for one in frame.left.get((stage, microbatch), [])] for stage in self.places}
        instead: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        reached = set[int]()
        for (stage, other), left in list(frame.left.items()):
            reached |= {stage} if other == microbatch else set()
            for one, shown in zip(left, own[stage], strict=False) if stage in reached else ():
                tensor = one.tensor()
                if tensor is not None and (other != microbatch or shown is not one.values):
                    instead[id(tensor)] = tensor, shown
        with exchanged(list(self.places.values()), instead):
            yield
