"""Cells of slices: a stage on a part of the positions of a micro-batch, with the keys and values of the slices before it.

    F of slice 2    queries 2 ─► attention ◀─ keys and values 0, 1, 2        writes keys and values 2 as leaves
    B of slice 2    gradients of keys and values 2 enter, those of 0 and 1 are added to their leaves

B runs from the last slice to the first. So when B of a slice begins, the leaves of its keys and values have the gradients of all later
slices. Attention over keys that are concatenated keeps the parts for its backward, not the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from pipecompile.runtime.cells.forward_backward import (
    InputGradients,
    OutputGradients,
    SavedGraph,
    forward_with_graph,
    make_leaves,
    roots_of,
    take_gradients,
)
from pipecompile.runtime.cells.recompute import StageRun
from pipecompile.runtime.registers import CellRegisters, Frame, Run
from pipecompile.torch_private.autograd_engine import accumulate, saved_tensor_hooks

__all__ = ["KeysValues", "SliceRun", "SliceState", "SlicedAttention", "SlicedPositions", "SlicedRows", "slice_run", "sliced_backward", "sliced_forward"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class KeysValues:
    """The keys and values of all attentions of a stage for one slice, as leaves that collect gradients: keys and values in turn."""

    leaves: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> KeysValues:
        """Return leaves in the memory of the tensors."""
        return cls(tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors))


@dataclass(slots=True, eq=False)
class SliceState:
    """The state that the attentions and positions of a stage read while the stage runs on a slice.

    `length` counts the positions of a slice, `n_attentions` the attentions of the stage. `earlier` are the keys and values of the slices
    before, `own` those of this slice so far.
    """

    length: int
    n_attentions: int = 0
    earlier: Sequence[KeysValues] = ()
    own: list[torch.Tensor] = field(default_factory=list)
    masks: dict[Any, torch.Tensor] = field(default_factory=dict)

    @property
    def offset(self) -> int:
        """The number of positions before this slice."""
        return self.length * len(self.earlier)

    @contextmanager
    def entered(self, earlier: Sequence[KeysValues]) -> Iterator[None]:
        """Run a stage on the slice after `earlier` in this context."""
        self.earlier, self.own = earlier, [torch.empty(0)] * (2 * self.n_attentions)
        try:
            yield
        finally:
            self.earlier, self.own = (), []

    def mask(self, query: torch.Tensor) -> torch.Tensor:
        """Return the mask (positions, earlier and own positions) of causal attention: 0, or minus infinity. All attentions share one."""
        key = self.offset, query.dtype, query.device
        if key not in self.masks:
            shape = self.length, self.offset + self.length
            is_later = torch.ones(shape, dtype=torch.bool, device=query.device).triu(self.offset + 1)
            self.masks[key] = torch.zeros(shape, dtype=query.dtype, device=query.device).masked_fill(
                is_later, -torch.inf
            )
        return self.masks[key]


class _OfSlice(nn.Module):
    """A call whose result depends on the slice. The state is not part of the module's own state."""

    def __init__(self, state: SliceState) -> None:
        super().__init__()
        self.state = state


class SlicedPositions(_OfSlice):
    """Positions from 0, as positions of the slice."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the positions, moved by those before the slice."""
        return positions + self.state.offset


class SlicedRows(_OfSlice):
    """Rows of a table with a row per position, from its beginning."""

    def __init__(self, state: SliceState, dim: int) -> None:
        super().__init__(state)
        self.dim = dim

    def forward(self, table: torch.Tensor) -> torch.Tensor:
        """Return the rows of the slice."""
        return table.narrow(self.dim, self.state.offset, self.state.length)


class SlicedAttention(_OfSlice):
    """Causal attention of the queries of a slice over keys and values of all slices so far."""

    def __init__(self, state: SliceState) -> None:
        super().__init__(state)
        self.place = state.n_attentions
        state.n_attentions += 1

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the attention (..., positions, features)."""
        state, place = self.state, 2 * self.place
        state.own[place : place + 2] = key, value
        if not state.earlier:
            return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
        keys, values = (
            [*(earlier.leaves[place + index] for earlier in state.earlier), own]
            for index, own in ((0, key), (1, value))
        )
        return _attention(query, keys, values, state.mask(query), options)


def _attention(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    mask: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """Return attention over concatenated keys and values, of which autograd keeps the parts. Hooks of the user get what they get
    without slices.
    """
    joined = [torch.cat([*parts], -2) for parts in (keys, values)]
    function: Callable[..., torch.Tensor] = nn.functional.scaled_dot_product_attention
    if saved_tensor_hooks() is not None:
        return function(query, *joined, attn_mask=mask, **options)
    parts_of = {one.data_ptr(): (one.shape, parts) for one, parts in zip(joined, (keys, values), strict=True)}

    def pack(tensor: torch.Tensor) -> Any:
        shape, parts = parts_of.get(tensor.data_ptr(), (None, ()))
        is_joined = tensor.shape == shape and tensor.is_contiguous()
        return [part.detach() for part in parts] if is_joined else tensor.detach()

    with saved_tensors_hooks(pack, lambda kept: torch.cat(kept, -2) if isinstance(kept, list) else kept):
        return function(query, *joined, attn_mask=mask, **options)


# -- cells ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceRun(StageRun):
    """A stage's function on a device, for one slice. `earlier` are registers of keys and values; of R, `own` is None: F has written
    them.
    """

    state: SliceState
    earlier: Sequence[int]
    own: int | None

    def forward(self, frame: Frame, values: list[Any]) -> Sequence[Any]:
        """Return the outputs, and keep the keys and values alone."""
        make_leaves(values, casts=self.effects.casts)
        return self._noted(frame, self._function(frame)(*values, *self._size(frame)))

    def plain(self, frame: Frame, values: list[Any]) -> Sequence[Any]:
        """Return the outputs of a stage without a backward."""
        return self._noted(frame, self._function(frame)(*values, *self._size(frame)))

    def recorded(self, frame: Frame, values: list[Any]) -> SavedGraph:
        """Run the forward and return what its backward needs."""
        return self.with_graph(frame, values)[1]

    def with_graph(self, frame: Frame, values: list[Any]) -> tuple[Sequence[Any], SavedGraph]:
        """Return the outputs and the graph, whose edges are those of the outputs, and of keys and values."""
        function, size = self._function(frame), self._size(frame)
        results, graph = forward_with_graph(function, values, size, casts=self.effects.casts, known=self.known)
        return self._noted(frame, results), graph

    def _function(self, frame: Frame) -> Callable[..., Sequence[Any]]:
        """Return the stage with its keys and values behind its outputs."""
        earlier = [frame.registers[index] for index in self.earlier]

        def function(*values: Any) -> Sequence[Any]:
            with self.state.entered(earlier):
                return (*self.function(*values), *self.state.own)

        return function

    def _noted(self, frame: Frame, results: Sequence[Any]) -> Sequence[Any]:
        n_outputs = len(results) - 2 * self.state.n_attentions
        if self.own is not None:
            frame.registers[self.own] = KeysValues.of(results[n_outputs:])
        return results[:n_outputs]


def slice_run(state: SliceState | None, registers: CellRegisters, name: str, stage: StageRun) -> StageRun:
    """Return the run of a stage on a slice, whose keys and values have this name; the run itself if micro-batches are whole."""
    if state is None:
        return stage
    plain = stage.function, stage.size_of, stage.effects, stage.device, stage.log
    return SliceRun(*plain, state=state, earlier=registers.all_of(name), own=registers.writes.get(name))


def sliced_forward(stage: SliceRun, inputs: Sequence[int], outputs: Sequence[int], saved: int | None) -> Run:
    """Return the function of an F on a slice. Inputs, outputs and `saved` are registers; without `saved` there is no backward."""

    def forward(frame: Frame) -> None:
        registers = frame.registers
        values = [registers[index] for index in inputs]
        if saved is None:
            results = stage.plain(frame, values)
        else:
            results, registers[saved] = stage.with_graph(frame, values)
        for index, value in zip(outputs, results, strict=True):
            registers[index] = value

    return forward


def sliced_backward(
    saved: int, gradients: OutputGradients, sent: InputGradients, own: int, unshared: Collection[int] = ()
) -> Run:
    """Return the function of a B on a slice. `own` is the register of the keys and values of the slice."""
    unshared = frozenset(unshared)

    def backward(frame: Frame) -> None:
        registers = frame.registers
        graph: SavedGraph = registers[saved]
        roots, root_gradients = roots_of(registers, graph, gradients)
        leaves = registers[own].leaves
        for edge, leaf in zip(graph.edges[len(graph.edges) - len(leaves) :], leaves, strict=True):
            if edge is not None and leaf.grad is not None:
                roots.append(edge)
                root_gradients.append(leaf.grad)
        if roots:
            accumulate(roots, root_gradients)
        take_gradients(registers, graph, sent, root_gradients, unshared)

    return backward
