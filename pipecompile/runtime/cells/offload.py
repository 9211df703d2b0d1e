"""Offloading: what a forward saved for its backward is on the host between OFFLOAD and RELOAD.

    F         stage ─► saved tensors ─► SavedTensors       parameters and buffers stay where they are
    OFFLOAD   SavedTensors: storages ─► host               the device's memory is free as soon as the copy is over
    RELOAD    SavedTensors: host ─► storages               a new copy on the device, with the same numbers
    B or I    saved tensors ◄─ SavedTensors                a read between OFFLOAD and RELOAD is an error

Autograd hands every tensor that it saves to a hook, and asks for it in the backward. Tensors that share a storage share its copy.
On a CPU the device waits for each copy. On a GPU both copies have streams of their own, to and from page-locked memory that serves the
next micro-batches too: then FREE lets go of what is copied, when compute has waited for the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from pipecompile.ir import Action, Kind
from pipecompile.runtime.cells.forward_backward import SavedGraph
from pipecompile.runtime.registers import CellRegisters, Frame, Run
from pipecompile.torch_private.accelerators import is_accelerator
from pipecompile.torch_private.autograd_engine import saved_tensor_hooks
from pipecompile.torch_private.storages import storage_key, version_of

__all__ = [
    "Allocate", "HostBuffer", "OffloadedGraph", "SavedTensors", "copy_cell", "offloaded_forward", "resident_storages",
]  # fmt: skip

Allocate = Callable[[int], torch.Tensor]
"""From a number of bytes to a tensor of them on a device, in memory of its compute."""


def resident_storages(stage: nn.Module) -> frozenset[int]:
    """Return the addresses of the parameters and buffers of a stage, which stay on the device."""
    tensors = (*stage.parameters(), *stage.buffers())
    return frozenset(storage_key(tensor) for tensor in tensors if tensor.layout is torch.strided)


@dataclass(frozen=True, slots=True)
class _Place:
    """A saved tensor: its number, the number of its storage, and how it lies there."""

    number: int
    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class SavedTensors:
    """The tensors that autograd saved in one forward, by storage.

    resident   addresses of storages that stay on the device
    storages   per storage its bytes on the device; None while the host has them
    host       per storage its bytes on the host
    versions   per saved tensor, until OFFLOAD, the tensor of the device and the version that autograd saved
    stale      per saved tensor that was written before OFFLOAD, by its number, the error of its backward
    """

    resident: frozenset[int]
    storages: list[torch.Tensor | None] = field(default_factory=list)
    host: list[torch.Tensor] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    stale: dict[int, str] = field(default_factory=dict)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Take a tensor that autograd saves, and return its place. What cannot move is returned as it is."""
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return tensor
        address = storage_key(tensor)
        if not tensor.numel() or tensor.is_conj() or tensor.is_neg() or address in self.resident:
            return tensor
        if address not in self.numbers:
            self.numbers[address] = len(self.storages)
            self.storages.append(_bytes_of(tensor))
        self.versions.append((tensor.detach(), version_of(tensor)))
        storage, offset = self.numbers[address], int(tensor.storage_offset())
        return _Place(len(self.versions) - 1, storage, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)

    def unpack(self, place: Any) -> torch.Tensor:
        """Return the tensor of a place. Raise RuntimeError if it is on the host, or was written after autograd saved it."""
        if not isinstance(place, _Place):
            tensor: torch.Tensor = place
            return tensor
        if place.number in self.stale:
            raise RuntimeError(self.stale[place.number])
        storage = self.storages[place.storage]
        if storage is None:
            raise RuntimeError("a tensor saved by this forward is on the host: its RELOAD has not run")
        empty = torch.empty(0, dtype=place.dtype, device=storage.device)
        return empty.set_(storage.untyped_storage(), place.offset, place.size, place.stride)

    def offload(self, buffer: HostBuffer | None = None) -> list[torch.Tensor]:
        """Copy all storages to the host, and let go of them. Return them: they must live until the copies are over.

        Without a `buffer` they are over; those into a buffer run on the current stream.
        """
        for number, (tensor, version) in enumerate(self.versions):
            if version_of(tensor) != version:
                self.stale[number] = (
                    f"a tensor of shape {tuple(tensor.shape)} that autograd saved was modified by an inplace operation: it is "
                    f"at version {version_of(tensor)}, expected version {version}"
                )
        self.versions.clear()
        self.numbers.clear()
        storages = [storage for storage in self.storages if storage is not None]
        self.host = [one.to("cpu", copy=True) for one in storages] if buffer is None else buffer.copies_of(storages)
        self.storages = [None] * len(self.host)
        return storages

    def reload(self, device: torch.device, allocate: Allocate | None = None) -> None:
        """Copy all storages back to the device; into memory of `allocate` on the current stream."""
        if allocate is None:
            self.storages = [tensor.to(device, copy=True) for tensor in self.host]
        else:
            self.storages = [allocate(tensor.nbytes).copy_(tensor, non_blocking=True) for tensor in self.host]
        self.host = []


class HostBuffer:
    """Memory of the host for what one forward saved, page-locked for a GPU. It is kept: the next copy into it must wait for its reader."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def copies_of(self, storages: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of the storages of a device in this memory, which the current stream makes."""
        for number, storage in enumerate(storages):
            if number == len(self.tensors):
                self.tensors.append(_host_memory(storage))
            elif self.tensors[number].nbytes < storage.nbytes:
                self.tensors[number] = _host_memory(storage)
        pairs = zip(self.tensors, storages, strict=False)
        return [tensor[: storage.nbytes].copy_(storage, non_blocking=True) for tensor, storage in pairs]


def _host_memory(storage: torch.Tensor) -> torch.Tensor:
    return torch.empty(storage.nbytes, dtype=torch.uint8, device="cpu", pin_memory=is_accelerator(storage.device))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the storage of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


# -- instructions -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class OffloadedGraph:
    """The graph of a forward, the tensors that it saved, and the places of the leaves made from its inputs.

    `tensors` is None if hooks of the user saw the tensors that autograd saved: then nothing moves.
    """

    graph: SavedGraph
    tensors: SavedTensors | None
    leaves: list[Any]


def offloaded_forward(forward: Run, module: nn.Module, saved: int) -> Run:
    """Return an F of a stage with `module` that will be offloaded. `forward` is the F without that, and writes to the register `saved`."""

    def run(frame: Frame) -> None:
        tensors = None if saved_tensor_hooks() is not None else SavedTensors(resident_storages(module))
        with nullcontext() if tensors is None else saved_tensors_hooks(tensors.pack, tensors.unpack):
            forward(frame)
        graph: SavedGraph = frame.registers[saved]
        leaves = [None if leaf is None or tensors is None else tensors.pack(leaf.detach()) for leaf in graph.leaves]
        frame.registers[saved] = OffloadedGraph(graph, tensors, leaves)

    return run


def copy_cell(
    action: Action,
    registers: CellRegisters,
    device: torch.device,
    *,
    buffer: int | None = None,
    allocate: Allocate | None = None,
) -> Run:
    """Return the function of an OFFLOAD or a RELOAD. With `allocate` it runs on a stream of its own, an OFFLOAD into a `buffer`."""
    (read,), (written,) = registers.reads.values(), registers.writes.values()
    if action.kind is Kind.OFFLOAD:
        return _offload(buffer, read, written)
    return _reload(read, written, device, allocate)


def _offload(buffer: int | None, saved: int, held: int) -> Run:
    """Return the function of an OFFLOAD: what the register `saved` has moves to the host and into the register `held`.

    With a `buffer`, a register, the copy runs on the current stream, and `saved` has the memory of the device until its FREE.
    """

    def offload(frame: Frame) -> None:
        kept: OffloadedGraph = frame.registers[saved]
        if kept.tensors is not None:
            for leaf, place in zip(kept.graph.leaves, kept.leaves, strict=True):
                if leaf is not None and isinstance(place, _Place):
                    leaf.data = leaf.new_empty(()).expand(leaf.shape)
            if buffer is None:
                kept.tensors.offload()
            else:
                memory = frame.registers[buffer] = frame.host_buffers.setdefault(buffer, HostBuffer())
                frame.registers[saved] = kept.tensors.offload(memory)
        frame.registers[held] = kept

    return offload


def _reload(held: int, saved: int, device: torch.device, allocate: Allocate | None = None) -> Run:
    """Return the function of a RELOAD, which writes to the register `saved` what an F without offloading would have written.

    With `allocate` the copy runs on the current stream.
    """

    def reload(frame: Frame) -> None:
        kept: OffloadedGraph = frame.registers[held]
        if kept.tensors is not None:
            kept.tensors.reload(device, allocate)
            for leaf, place in zip(kept.graph.leaves, kept.leaves, strict=True):
                if leaf is not None and isinstance(place, _Place):
                    leaf.data = kept.tensors.unpack(place)
        frame.registers[saved] = kept.graph

    return reload
