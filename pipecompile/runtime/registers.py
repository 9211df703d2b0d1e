"""Registers: the state of one mini-batch while a program runs, and the registers of one compute instruction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipecompile.ir import HOST, Instruction, Operand, Value

__all__ = ["CellRegisters", "Frame", "Run", "Spans"]

Spans = list[tuple[int, str, Any, Any]]
"""(device index, action, start, end) per compute instruction, in the order in which they ended; times in seconds, or moments on a
GPU (`gpu_spans.py`)."""


@dataclass(slots=True)
class Frame:
    """State of one mini-batch while a program runs. Everything else of a program is made once and serves all runs.

    registers     values that instructions read and write; receive buffers
    channels      one per SEND with its RECV: the value on its way (inline), or a queue of values (threads)
    sizes         samples per micro-batch
    arrivals      (name, is gradient) ──► per micro-batch the value that the host sends
    departures    (name, is gradient) ──► per micro-batch the value for the host; of a gradient {consuming stage: gradient}
    spans         times of the compute instructions
    events        (device, index in its row) ──► event recorded after that instruction; recorded again in the next run, as those of
                  the times of cells are
    recordings    number of the recording of each micro-batch, where a program serves several
    host_buffers  register ──► memory of the host for what forwards saved, kept for the next run
    left          (stage, micro-batch) ──► the tensors that its forward has left on objects (cells/left_tensors.py)
    kept          (stage, micro-batch) ──► the attributes that its forward has left, for its backward (cells/backward_reads.py)
    exchanged     (id of a container, key) ──► the value that a backward has replaced, and restores at its end
    ended         micro-batch ──► how many of its backwards are over, where these attributes are kept
    objects       micro-batch ──► per recording the objects that its forward has made for hooks, and the stages whose backward is over
                  (cells/call_memos.py)
    has_hooks     whether layers or gradients have hooks in this run
    """

    registers: list[Any]
    channels: list[Any]
    sizes: tuple[int, ...] = ()
    arrivals: dict[tuple[str, bool], Any] = field(default_factory=dict)
    departures: dict[tuple[str, bool], list[Any]] = field(default_factory=dict)
    spans: Spans = field(default_factory=list)
    events: dict[Any, Any] = field(default_factory=dict)
    recordings: tuple[int, ...] = ()
    host_buffers: dict[int, Any] = field(default_factory=dict)
    left: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    kept: dict[tuple[int, int], dict[Any, Any]] = field(default_factory=dict)
    exchanged: dict[tuple[int, Any], Any] = field(default_factory=dict)
    ended: Counter[int] = field(default_factory=Counter)
    objects: dict[int, tuple[dict[Any, dict[int, Any]], list[int]]] = field(default_factory=dict)
    has_hooks: bool = False

    def clear(self) -> None:
        """Drop all values, in the very containers, which a traceback may hold. The frame cannot be used again."""
        for container in (
            self.registers,
            self.channels,
            self.events,
            self.arrivals,
            self.departures,
            self.host_buffers,
            self.left,
            self.kept,
            self.exchanged,
            self.objects,
            self.ended,
        ):
            container.clear()


Run = Callable[[Frame], None]
"""One instruction as a function of the frame, with all names resolved to registers."""


class CellRegisters:
    """Registers of one compute instruction, by the names of its operands.

    `reads` and `writes` map activations and saved state; gradients have methods of their own.
    """

    def __init__(self, instruction: Instruction, register: Callable[[Operand], int]) -> None:
        self._instruction = instruction
        self._read = [(operand.value, register(operand)) for operand in instruction.reads]
        self._written = [(operand.value, register(operand)) for operand in instruction.writes]
        self.reads = {value.name: index for value, index in self._read if value.consumer is None}
        self.writes = {value.name: index for value, index in self._written if value.consumer is None}

    def slot_of(self, value: Value) -> int | None:
        """Return the buffer slot that `value` is written to, or None."""
        return next((operand.slot for operand in self._instruction.writes if operand.value == value), None)

    def all_of(self, name: str) -> tuple[int, ...]:
        """Return the registers of all micro-batches of a value that the instruction reads, in their order."""
        found = [(value.microbatch, index) for value, index in self._read if value.name == name]
        return tuple(index for _, index in sorted(found))

    def output_gradients(self, outputs: Sequence[str]) -> list[tuple[int, list[int]]]:
        """Return (output, registers of its gradients) pairs, gradients by falling consumer; the host counts as the last stage."""
        ranked: dict[str, list[tuple[float, int]]] = {}
        for value, index in self._read:
            if value.consumer is not None and value.name in outputs:
                rank = float("inf") if value.consumer == HOST else float(value.consumer)
                ranked.setdefault(value.name, []).append((rank, index))
        return [
            (outputs.index(name), [index for _, index in sorted(pairs, reverse=True)]) for name, pairs in ranked.items()
        ]

    def added_gradients(self, inputs: Sequence[str]) -> list[tuple[int, int]]:
        """Return (register, register) pairs: of a gradient of an input that another stage of the device computed, and of the
        instruction's own, to which it is added.
        """
        own = {value.name: index for value, index in self._written if value.consumer is not None}
        return [
            (index, own[value.name])
            for value, index in self._read
            if value.consumer is not None and value.name in inputs
        ]

    def input_gradients(self, inputs: Sequence[str]) -> list[tuple[int, int]]:
        """Return (register, input) pairs for the gradients that the instruction writes."""
        return [(index, inputs.index(value.name)) for value, index in self._written if value.consumer is not None]
