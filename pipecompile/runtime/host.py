"""What goes between the host and a device: micro-batches that arrive, outputs and gradients of inputs that depart."""

from __future__ import annotations

import torch

from pipecompile.runtime.cells.forward_backward import Run
from pipecompile.runtime.registers import Frame
from pipecompile.torch_private.devices import to_device

__all__ = ["arrive", "depart", "depart_gradient"]


def arrive(key: tuple[str, bool], microbatch: int, index: int, device: torch.device) -> Run:
    def run(frame: Frame) -> None:
        frame.registers[index] = to_device(frame.arrivals[key][microbatch], device)

    return run


def depart_gradient(key: tuple[str, bool], microbatch: int, index: int, consumer: int) -> Run:
    """The gradients of an input come from every stage that uses it, from several threads perhaps."""

    def run(frame: Frame) -> None:
        frame.departures[key][microbatch][consumer] = frame.registers[index]

    return run


def depart(key: tuple[str, bool], microbatch: int, index: int) -> Run:
    def run(frame: Frame) -> None:
        value = frame.registers[index]
        if isinstance(value, torch.Tensor):  # alone, but it still says whether a gradient was wanted
            value = value.detach().requires_grad_(value.requires_grad)
        frame.departures[key][microbatch] = value

    return run
