"""The inputs and outputs of a run on a list of micro-batches: each has its own, and nothing is cut or put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipecompile.batching.call_inputs import FlatInputs
from pipecompile.runtime.autograd_call import AutogradCall
from pipecompile.runtime.executable import Executable
from pipecompile.runtime.registers import Frame
from pipecompile.runtime.results import Outputs, summed_gradient

__all__ = ["ListedCall", "ListedPorts"]


@dataclass(frozen=True, slots=True)
class ListedPorts:
    """The inputs of a list: per micro-batch the number of its recording, the names of its inputs there, and its call.

    `name_of(number, value)` is the name of a value of a recording in the program.
    """

    recordings: Sequence[int]
    inputs: Sequence[Sequence[str]]
    name_of: Callable[[int, str], str]
    calls: Sequence[FlatInputs]

    def arrivals(self, leaves: Sequence[Sequence[Any]]) -> dict[tuple[str, bool], Any]:
        """Return the leaves by (name in the program, False), one per micro-batch; None where a recording has no such input."""
        arrivals: dict[tuple[str, bool], Any] = {}
        for m, (number, names, own) in enumerate(zip(self.recordings, self.inputs, leaves, strict=True)):
            for name, leaf in zip(names, own, strict=True):
                column = arrivals.setdefault((self.name_of(number, name), False), [None] * len(self.calls))
                column[m] = leaf
        return arrivals

    def gradients(self, frame: Frame) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return the inputs that require a gradient, each with its gradient."""
        pairs = []
        for m, (number, names, call) in enumerate(zip(self.recordings, self.inputs, self.calls, strict=True)):
            for name, leaf in zip(names, call.leaves, strict=True):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    parts = frame.departures.get((self.name_of(number, name), True))
                    pairs.append((leaf, summed_gradient(parts[m], leaf.device) if parts else None))
        return pairs

    def return_gradients(self, frame: Frame) -> None:
        """After a step, run backward from the inputs into the computation that made them."""
        pairs = [(leaf, gradient) for leaf, gradient in self.gradients(frame) if gradient is not None]
        if pairs:
            torch.autograd.backward([leaf for leaf, _ in pairs], [gradient for _, gradient in pairs])


@dataclass(slots=True)
class ListedCall(AutogradCall):
    """A call on a list of micro-batches; its results are a mapping of values by name for each."""

    executable: Executable
    ports: ListedPorts
    outputs: Sequence[Outputs]
    sizes: tuple[int, ...]
    frame: Frame | None = None
    spec: Any = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The inputs that require a gradient."""
        leaves = (leaf for call in self.ports.calls for leaf in call.tensors)
        return [leaf for leaf in leaves if leaf.requires_grad]

    def begin(self, leaves: Sequence[Sequence[Any]] | None = None) -> Frame:
        """Return a frame with these leaves per micro-batch; by default with detached ones."""
        if leaves is None:
            leaves = [call.detached().leaves for call in self.ports.calls]
        frame = self.executable.frame(self.sizes, self.ports.arrivals(leaves))
        frame.recordings = tuple(self.ports.recordings)
        return frame

    def results(self, frame: Frame) -> list[dict[str, Any]]:
        """Return the values of each micro-batch by name."""
        return [
            {name: frame.departures[self.ports.name_of(number, name), False][m] for name in _names(outputs)}
            for m, (number, outputs) in enumerate(zip(self.ports.recordings, self.outputs, strict=True))
        ]

    def constants(self, frame: Frame, results: Any) -> list[Any]:  # noqa: ARG002 each result is one part
        """Return the results that have no gradient."""
        values = [value for own in results for value in own.values()]
        return [value for value in values if isinstance(value, torch.Tensor) and not value.requires_grad]

    def accept(self, frame: Frame, gradients: Any) -> None:
        """Take the gradients of the results."""
        for m, (number, own) in enumerate(zip(self.ports.recordings, gradients, strict=True)):
            for name, gradient in own.items():
                key = self.ports.name_of(number, name), True
                frame.arrivals.setdefault(key, [None] * len(gradients))[m] = gradient

    def input_gradients(self, frame: Frame) -> list[torch.Tensor | None]:
        """Return the gradient of each of the `tensors`."""
        return [gradient for _, gradient in self.ports.gradients(frame)]


def _names(outputs: Outputs) -> list[str]:
    return list(dict.fromkeys(leaf.value for leaf in outputs.leaves if leaf.value is not None))
