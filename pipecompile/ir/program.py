"""A program: per device, the ordered list of everything that the device does for one mini-batch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path

from pipecompile.ir.action import Action
from pipecompile.ir.directions import Direction
from pipecompile.ir.overlap import Pair
from pipecompile.ir.routes import Route, Tie, place
from pipecompile.ir.views import html_of
from pipecompile.text.text_file import save_text

__all__ = [
    "Instruction",
    "Op",
    "Operand",
    "Program",
    "Value",
    "held",
    "keys_values",
    "offloaded",
    "part_of",
    "recipe",
    "saved",
    "weight_saved",
]


@dataclass(frozen=True, slots=True)
class Value:
    """One micro-batch of a named value, or, with `consumer`, the gradient of the value that the consumer sends back."""

    name: str
    microbatch: int
    consumer: int | None = None

    def __str__(self) -> str:
        tick = "" if self.consumer is None else f"'{place(self.consumer)}"
        return f"{self.name}{tick}#{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Operand:
    """A value and the buffer that holds it. `slot` is None until the pass `assign_slots`."""

    value: Value
    slot: int | None = None

    def __str__(self) -> str:
        return str(self.value) if self.slot is None else f"{self.value}[{self.slot}]"


class Op(Enum):
    """The kind of an instruction."""

    COMPUTE = "COMPUTE"
    SEND = "SEND"
    RECV = "RECV"
    FREE = "FREE"
    BROADCAST = "BROADCAST"
    REDUCE = "REDUCE"

    __hash__ = object.__hash__  # faster than Enum.__hash__, as for Kind


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a device's program.

    COMPUTE has an `action`. SEND and FREE read one operand, RECV writes one. SEND and RECV have a `peer`: a device or
    HOST. BROADCAST and REDUCE have the name of a `tie`. With `overlaps`, the action runs at the same time as that of the next
    instruction.
    """

    op: Op
    reads: tuple[Operand, ...] = ()
    writes: tuple[Operand, ...] = ()
    action: Action | None = None
    peer: int | None = None
    tie: str | None = None
    overlaps: bool = False

    def __str__(self) -> str:
        reads, writes = " ".join(map(str, self.reads)), " ".join(map(str, self.writes))
        match self.op:
            case Op.COMPUTE:
                mark = "OVERLAP " if self.overlaps else ""
                return f"{mark}{self.action} {reads}{' ' * bool(reads)}->{' ' * bool(writes)}{writes}"
            case Op.SEND:
                return f"SEND {reads} to {place(self.peer)}"
            case Op.RECV:
                return f"RECV {writes} from {place(self.peer)}"
            case Op.FREE:
                return f"FREE {reads}"
            case Op.BROADCAST | Op.REDUCE:
                return f"{self.op.value} {self.tie}"


@dataclass(frozen=True, slots=True)
class Program:
    """Per device the ordered instructions of one mini-batch, and the routes and ties that they serve.

    `n_microbatches` counts what goes through the stages by itself. With `n_slices`, these are the slices of all micro-batches, micro-batch
    by micro-batch, and values and actions have the number of a slice: of 4 slices, `0F5` is slice 1 of micro-batch 1. The bytes
    of routes are those of a whole micro-batch. `directions` are further copies of all stages, as those of a Schedule.
    """

    n_stages: int
    n_microbatches: int
    placement: tuple[int, ...]
    routes: tuple[Route, ...]
    rows: tuple[tuple[Instruction, ...], ...]
    ties: tuple[Tie, ...] = ()
    n_slices: int = 1
    directions: tuple[Direction, ...] = ()

    @property
    def n_devices(self) -> int:
        """Number of pipeline devices."""
        return len(self.rows)

    @property
    def overlaps(self) -> frozenset[Pair]:
        """The actions that run at the same time, as those of a Schedule."""
        return frozenset(
            (one.action, after.action)
            for row in self.rows
            for one, after in pairwise(row)
            if one.overlaps and one.action is not None and after.action is not None
        )

    def __repr__(self) -> str:
        counts = f"n_stages={self.n_stages}, n_microbatches={self.n_microbatches}, n_devices={self.n_devices}"
        return f"Program({counts}, n_instructions={sum(map(len, self.rows))})"

    def __str__(self) -> str:
        """Return the text that `program_text.parse_program` reads."""
        placement = "".join(f" {device}" for device in self.placement)
        count = f"{self.n_microbatches} micro-batches"
        if self.n_slices != 1:
            count = f"{self.n_microbatches} slices, {self.n_slices} per micro-batch"
        lines = [f"program: {self.n_stages} stages on devices{placement}, {count}"]
        lines += map(str, (*self.directions, *self.routes, *self.ties))
        for device, row in enumerate(self.rows):
            lines.append(f"device {device}")
            lines += (f"  {instruction}" for instruction in row)
        return "\n".join(lines) + "\n"

    def _repr_html_(self) -> str | None:
        return html_of(self)

    def save(self, path: str | Path) -> None:
        """Write `str(program)` to a file. Raise InputError if it cannot be written."""
        save_text(path, str(self))


def saved(stage: int, microbatch: int) -> Value:
    """Return `@s#m`: what the forward of `stage` saves for its backward, or what a recomputation restores."""
    return Value(f"@{stage}", microbatch)


def weight_saved(stage: int, microbatch: int) -> Value:
    """Return `@s.w#m`: what the input gradient of `stage` keeps for its weight gradient."""
    return Value(f"@{stage}.w", microbatch)


def recipe(stage: int, microbatch: int) -> Value:
    """Return `@s.r#m`: what a forward keeps, beside its inputs, to be recomputed with the same result."""
    return Value(f"@{stage}.r", microbatch)


def offloaded(stage: int, microbatch: int) -> Value:
    """Return `@s.o#m`: what the forward of `stage` saves for its backward and OFFLOAD copies to the host."""
    return Value(f"@{stage}.o", microbatch)


def held(stage: int, microbatch: int) -> Value:
    """Return `@s.h#m`: what the host holds between OFFLOAD and RELOAD."""
    return Value(f"@{stage}.h", microbatch)


def keys_values(stage: int, unit: int) -> Value:
    """Return `@s.k#u`: keys and values of slice `u` in `stage`, which later slices of its micro-batch read, and their gradients."""
    return Value(f"@{stage}.k", unit)


def part_of(value: Value) -> Value | None:
    """Return `@s#m` for `@s.w#m`, else None. What I keeps for W was saved by the forward and is counted once."""
    name = value.name
    return Value(name[:-2], value.microbatch) if name.endswith(".w") and name[0] == "@" else None
