"""The lifetime of a value on one device, and its buffer slot: written once, read while live, freed once.

              write              FREE
    absent ──────────▶ live ──────────▶ freed
                      read ↺

Any other transition is a fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pipecompile.ir import Instruction, Op, Operand, Program, Value

__all__ = ["lifetime_faults"]


def lifetime_faults(program: Program, *, frees: bool, slots: bool) -> list[str]:
    """Return all reads, writes and frees at the wrong time; `frees` and `slots` say whether FREEs and slots are
    assigned.
    """
    faults: list[str] = []
    for device, row in enumerate(program.rows):
        device_state = _Device(frees, slots)
        for index, instruction in enumerate(row):
            step_faults = device_state.step(index, instruction)
            faults += (f"device {device}, step {index}, {instruction}: {fault}" for fault in step_faults)
        faults += (f"device {device}: {fault}" for fault in device_state.close())
    return faults


@dataclass(slots=True)
class _Life:
    """The life of one value: the step of its write, the operand written, and the step of its FREE."""

    written: int
    home: Operand
    freed: int | None = None


@dataclass(slots=True)
class _Device:
    """The values and occupied slots of a device while its row is walked."""

    frees: bool
    slots: bool
    lives: dict[Value, _Life] = field(default_factory=dict)
    holder: dict[tuple[str, int | None, int], Value] = field(default_factory=dict)

    def step(self, index: int, instruction: Instruction) -> Iterator[str]:
        """Yield the faults of one instruction and update the state."""
        for operand in instruction.reads:
            life = self.lives.get(operand.value)
            if life is None:
                yield f"{operand.value} is not on this device yet"
            elif life.freed is not None:
                yield f"{operand.value} is freed already, at step {life.freed}"
            else:
                if self.slots and operand.slot != life.home.slot:
                    yield f"{operand.value} is in {life.home}, not in {operand}"
                if instruction.op is Op.FREE:
                    self._free(index, operand.value, life)
        for operand in instruction.writes:
            yield from self._write(index, operand)

    def _free(self, index: int, value: Value, life: _Life) -> None:
        life.freed = index
        slot = life.home.slot
        if slot is not None:
            key = value.name, value.consumer, slot
            if self.holder.get(key) == value:
                del self.holder[key]

    def _write(self, index: int, operand: Operand) -> Iterator[str]:
        value = operand.value
        if value in self.lives:
            yield f"{value} is written already, at step {self.lives[value].written}"
        else:
            self.lives[value] = _Life(index, operand)
        if not self.slots:
            return
        if operand.slot is None:
            yield f"{value} has no slot"
            return
        key = value.name, value.consumer, operand.slot
        if key in self.holder:
            holder = self.holder[key]
            yield f"{operand} still holds {holder}, written at step {self.lives[holder].written} and not freed"
        self.holder[key] = value

    def close(self) -> Iterator[str]:
        if self.frees:
            for value, life in self.lives.items():
                if life.freed is None:
                    yield f"{value}, written at step {life.written}, is never freed"
