"""Tensors that several ranks use: the rank of the first stage that uses a tensor is its home, the other ranks have a copy.

    home    rank 0   wte.weight ──── refresh ───►  wte.weight, rank 3     before a run: the values of the home
                     wte.weight.grad ◄── settle ── its gradient           after it: one gradient, added once

A copy is the tensor of the rank's own model, where a mirror of one process is a tensor of its own. Only the home's rank has the
tensor in `parameters()`, so an optimizer updates it once. Only the home runs hooks on its gradients: a hook that a script registered on the
copy, too, would run on the same part twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

from pipecompile.distributed.messages.value_transport import ValueTransport
from pipecompile.graph.stages import Stage
from pipecompile.ir.directions import Placement
from pipecompile.parameters.placement import Homes, tensor_uses
from pipecompile.parameters.tied_mirrors import Mirrors
from pipecompile.torch_private.autograd_engine import gradient_hook_tables, is_joint_hook
from pipecompile.torch_private.recurrent_layers import flatten_weights
from pipecompile.torch_private.storages import version_of
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["TiedCopies", "TiedCopy", "place_on_ranks"]


@dataclass(slots=True)
class TiedCopy:
    """A tensor with its home on pipeline device `home`, and a copy on device `away`.

    `name` is the same on all ranks. `version` is the version counter of the copy after it was refreshed.
    """

    name: str
    tensor: torch.Tensor
    home: int
    away: int
    version: int = 0

    @property
    def layout(self) -> tuple[object, ...]:
        """The key of the layout of its values, which both ranks have."""
        return self.name, self.tensor.shape, self.tensor.dtype


class TiedCopies(Mirrors):
    """All copies of one specialization. Every rank lists all of them, in the same order, also those of other ranks."""

    def __init__(
        self, copies: tuple[TiedCopy, ...], values: ValueTransport, here: int, placements: tuple[Placement, ...] = ()
    ) -> None:
        super().__init__(placements=placements)
        self.copies, self.values, self.here = copies, values, here
        self.pairs = {pair for copy in copies for pair in ((copy.home, copy.away), (copy.away, copy.home))}
        self.tied = frozenset(id(copy.tensor) for copy in copies)
        self._refreshed = [(copy.home, copy.name) for copy in copies if copy.away == self.here]
        self._settled = [(c.away, name) for c in copies if c.home == self.here for name in (f"{c.name}'", c.name)]

    def joined_with(self, others: Iterable[Mirrors]) -> TiedCopies:
        """Return the copies of this specialization and of others, each tensor once per rank."""
        copies = {
            (id(copy.tensor), copy.home, copy.away): copy
            for one in (self, *others)
            for copy in cast(TiedCopies, one).copies
        }
        return TiedCopies(
            tuple(replace(copy, name=f"tied {place}") for place, copy in enumerate(copies.values())),
            self.values,
            self.here,
            self.placements,
        )

    def _expect(self, values: Sequence[tuple[int, str]]) -> None:
        for source in dict.fromkeys(source for source, _ in values):
            self.values.expect(source, [name for peer, name in values if peer == source])

    def refresh(self) -> None:
        """Send the values of homes to their copies, before a run. Drop gradients that a failed run left."""
        self._expect(self._refreshed)
        with torch.inference_mode(False), torch.no_grad():
            for copy in self.copies:
                if copy.home == self.here:
                    self.values.send(copy.away, copy.name, copy.tensor.data, copy.layout)
                elif copy.away == self.here:
                    copy.tensor.data.copy_(self.values.receive(copy.home, copy.name, copy.layout))
                    copy.tensor.grad, copy.version = None, version_of(copy.tensor)

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """Run the program in this context: copies here have no hooks of their own, but those of `register_multi_grad_hook`."""
        copies = [copy.tensor for copy in self.copies if copy.away == self.here]
        tables = [table for tensor in copies for table in gradient_hook_tables(tensor)]
        kept = [(table, {key: hook for key, hook in table.items() if not is_joint_hook(hook)}) for table in tables]
        for table, hooks in kept:
            for key in hooks:
                del table[key]
        try:
            yield
        finally:
            for table, hooks in kept:
                table.update(hooks)

    def settle(self) -> None:
        """Send gradients and in-place writes of copies to their homes, after a run."""
        self._expect(self._settled)
        with torch.inference_mode(False), torch.no_grad():
            for copy in self.copies:
                if copy.away == self.here:
                    self._send_home(copy)
                elif copy.home == self.here:
                    self._receive_home(copy)

    def _send_home(self, copy: TiedCopy) -> None:
        gradient, copy.tensor.grad = copy.tensor.grad, None
        is_written = not isinstance(copy.tensor, nn.Parameter) or version_of(copy.tensor) != copy.version
        self.values.send(copy.home, f"{copy.name}'", gradient)
        self.values.send(copy.home, copy.name, copy.tensor.data if is_written else None)

    def _receive_home(self, copy: TiedCopy) -> None:
        """Add the gradient through the home's AccumulateGrad node, so that its hooks run; take over in-place writes."""
        gradient = self.values.receive(copy.away, f"{copy.name}'")
        written = self.values.receive(copy.away, copy.name)
        if gradient is not None:
            torch.autograd.backward((copy.tensor,), (gradient.to(copy.tensor.device),))
        if written is not None:
            copy.tensor.data.copy_(written)


def place_on_ranks(
    graph: TracedGraph,
    stages: Sequence[Stage],
    device: torch.device,
    placements: tuple[Placement, ...],
    homes: Homes,
    values: ValueTransport,
    here: int,
) -> TiedCopies:
    """Assign a home to every tensor of the stages, move those of this rank's stages to its `device`, and return the copies.

    The first of `placements` has the homes; others are those of further copies of all stages.
    """
    copies: dict[tuple[int, int], TiedCopy] = {}
    for placement in placements:
        for stage, tensor in tensor_uses(graph, stages):
            memory = placement[stage.index]
            home = homes.assign(tensor, memory)
            if memory == here:
                homes.move(tensor, device, is_copy=home != memory)
            if home != memory and (memory, id(tensor)) not in copies:
                assert isinstance(home, int)
                copies[memory, id(tensor)] = TiedCopy(f"tied {len(copies)}", tensor, home, memory)
    own = {stage for placement in placements for stage, device_of in enumerate(placement) if device_of == here}
    flatten_weights(one for stage in stages if stage.index in own for one in stage.module.modules())
    return TiedCopies(tuple(copies.values()), values, here, placements)
