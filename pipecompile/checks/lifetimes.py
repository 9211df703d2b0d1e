"""The life of a value on one device: written once, read while it lives, freed once; and its buffer slot.

              write              FREE
    absent ──────────▶ live ──────────▶ freed
                      read ↺

Any other step is a fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pipecompile.ir import Instruction, Op, Operand, Program, Value

__all__ = ["lifetime_faults"]


def lifetime_faults(program: Program, *, frees: bool, slots: bool) -> list[str]:
    """All reads, writes and frees that come at the wrong time; `frees` and `slots` say what is assigned already."""
    faults: list[str] = []
    for device, row in enumerate(program.rows):
        device_state = _Device(frees, slots)
        for index, instruction in enumerate(row):
            found = device_state.step(index, instruction)
            faults += (f"device {device}, step {index}, {instruction}: {fault}" for fault in found)
        faults += (f"device {device}: {fault}" for fault in device_state.close())
    return faults


@dataclass(slots=True)
class _Device:
    """What a device holds while its row is walked."""

    frees: bool
    slots: bool
    written: dict[Value, tuple[int, Operand]] = field(default_factory=dict)
    freed: dict[Value, int] = field(default_factory=dict)
    holder: dict[tuple[str, int | None, int], Value] = field(default_factory=dict)

    def step(self, index: int, instruction: Instruction) -> Iterator[str]:
        for operand in instruction.reads:
            yield from self._read(operand)
        if instruction.op is Op.FREE:
            self._free(index, instruction.reads[0])
        for operand in instruction.writes:
            yield from self._write(index, operand)

    def _read(self, operand: Operand) -> Iterator[str]:
        value = operand.value
        if value not in self.written:
            yield f"{value} is not on this device yet"
        elif value in self.freed:
            yield f"{value} is freed already, at step {self.freed[value]}"
        elif self.slots and operand.slot != (home := self.written[value][1]).slot:
            yield f"{value} is in {home}, not in {operand}"

    def _free(self, index: int, operand: Operand) -> None:
        value = operand.value
        if value in self.written and value not in self.freed:
            self.freed[value] = index
            home = self.written[value][1]
            if home.slot is not None and self.holder.get((value.name, value.consumer, home.slot)) == value:
                del self.holder[value.name, value.consumer, home.slot]

    def _write(self, index: int, operand: Operand) -> Iterator[str]:
        value = operand.value
        if value in self.written:
            yield f"{value} is written already, at step {self.written[value][0]}"
        self.written.setdefault(value, (index, operand))
        if not self.slots:
            return
        if operand.slot is None:
            yield f"{value} has no slot"
            return
        key = value.name, value.consumer, operand.slot
        if key in self.holder:
            holder = self.holder[key]
            yield f"{operand} still holds {holder}, written at step {self.written[holder][0]} and not freed"
        self.holder[key] = value

    def close(self) -> Iterator[str]:
        if self.frees:
            for value, (index, _) in self.written.items():
                if value not in self.freed:
                    yield f"{value}, written at step {index}, is never freed"
