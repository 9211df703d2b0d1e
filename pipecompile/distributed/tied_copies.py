"""Tensors that several ranks use: the rank that uses one first is its home, the others hold a copy.

    home    rank 0   wte.weight ──── refresh ───►  wte.weight, rank 3     before a run: the home's numbers
                     wte.weight.grad ◄── settle ── its gradient           after it: one gradient, added once

As the mirrors of one process, but a copy is the tensor of the rank's own model. Only the home's is an optimizer to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pipecompile.distributed.communicator import Communicator
from pipecompile.driver.specialization import Build
from pipecompile.parameters.placement import Homes, tensor_uses
from pipecompile.parameters.tied_mirrors import Mirrors
from pipecompile.torch_private.storages import version_of

__all__ = ["TiedCopies", "place_on_ranks"]


@dataclass(slots=True)
class TiedCopy:
    """A tensor that lives on device `home` and is used on `away`, too."""

    name: str
    tensor: torch.Tensor
    home: int
    away: int
    version: int = 0


class TiedCopies(Mirrors):
    """The tensors of one build that are used away from home; every rank knows all of them, in the same order."""

    def __init__(self, copies: tuple[TiedCopy, ...], communicator: Communicator) -> None:
        super().__init__()
        self.copies, self.communicator, self.here = copies, communicator, communicator.ranks.index
        self.outgoing = [(c.away, name) for c in copies if c.home == self.here for name in (f"{c.name}'", c.name)]
        self.tied = frozenset(id(copy.tensor) for copy in copies)
        self.incoming = [(copy.home, copy.name) for copy in copies if copy.away == self.here]

    def _expect(self, coming: Sequence[tuple[int, str]]) -> None:
        for source in dict.fromkeys(source for source, _ in coming):
            self.communicator.expect(source, [name for peer, name in coming if peer == source])

    def refresh(self) -> None:
        """Before a run. A gradient left over from a run that failed is dropped."""
        self._expect(self.incoming)
        with torch.inference_mode(False), torch.no_grad():
            for copy in self.copies:
                if copy.home == self.here:
                    self.communicator.send(copy.away, copy.name, copy.tensor.data)
                elif copy.away == self.here:
                    copy.tensor.data.copy_(self.communicator.take(copy.home, copy.name))
                    copy.tensor.grad, copy.version = None, version_of(copy.tensor)

    def settle(self) -> None:
        """After a run: gradients go home, through the home's own place in autograd, and so does what was written."""
        self._expect(self.outgoing)
        with torch.inference_mode(False), torch.no_grad():
            for copy in self.copies:
                if copy.away == self.here:
                    self._bring(copy)
                elif copy.home == self.here:
                    self._receive(copy)

    def _bring(self, copy: TiedCopy) -> None:
        gradient, copy.tensor.grad = copy.tensor.grad, None
        is_written = not isinstance(copy.tensor, nn.Parameter) or version_of(copy.tensor) != copy.version
        self.communicator.send(copy.home, f"{copy.name}'", gradient)
        self.communicator.send(copy.home, copy.name, copy.tensor.data if is_written else None)

    def _receive(self, copy: TiedCopy) -> None:
        gradient, written = (
            self.communicator.take(copy.away, f"{copy.name}'"),
            self.communicator.take(copy.away, copy.name),
        )
        if gradient is not None:
            torch.autograd.backward((copy.tensor,), (gradient.to(copy.tensor.device),))
        if written is not None:
            copy.tensor.data.copy_(written)


def place_on_ranks(build: Build, homes: Homes, communicator: Communicator) -> TiedCopies:
    """Find the home of every tensor, move those of this rank's stages to its device, and the rest of what stages share."""
    found: dict[tuple[int, int], TiedCopy] = {}
    for stage, tensor in tensor_uses(build.graph, build.stages):
        memory = build.plan.placement[stage.index]
        home = homes.assign(tensor, memory)
        if memory == communicator.ranks.index:
            homes.move(tensor, build.stage_devices[stage.index], is_copy=home != memory)
        if home != memory and (memory, id(tensor)) not in found:
            assert isinstance(home, int)
            found[memory, id(tensor)] = TiedCopy(f"tied {len(found)}", tensor, home, memory)
    return TiedCopies(tuple(found.values()), communicator)
