"""The two levels below the plan: a *schedule* says in which order each device computes; a *program* says everything
that it does. Plain frozen data, no torch.

    schedule := row per device                       row     := action ("," action)*
    action   := STAGE KIND MICROBATCH                KIND    := "F" | "B" | "I" | "W"          2F0

    program  := header route* (device instruction*)*      one a line; program_text.py shows and reads it
    value    := NAME "#" MICROBATCH                  an activation, or "@s", what stage s saved for its backward
              | NAME "'" CONSUMER "#" MICROBATCH     the gradient of NAME that stage CONSUMER (or "host") computed
    operand  := value [ "[" SLOT "]" ]               SLOT numbers the buffers of one NAME on one device
    instruction := action operand* "->" operand*     compute
                 | "SEND" operand "to" PEER          PEER is a device, or "host", where inputs and outputs live
                 | "RECV" operand "from" PEER
                 | "FREE" operand                    the last use is over
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

from pipecompile.errors import ScheduleError

__all__ = [
    "HOST",
    "LOSS",
    "TARGET",
    "Action",
    "Instruction",
    "Kind",
    "Op",
    "Operand",
    "Program",
    "Route",
    "Schedule",
    "Value",
    "chain",
    "place",
    "saved",
]

HOST = -1
"""The place where model inputs come from and outputs go to: a peer, and a route's end, like any other."""

TARGET, LOSS = "@target", "@loss"
"""Names of the two values that a training step adds to those of the model."""


class Kind(Enum):
    """What an action computes. `BACKWARD` does the work of `INPUT_GRAD` and `WEIGHT_GRAD` in one go."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"


_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class Action:
    """One cell of a schedule: `2F0` is the forward of stage 2 on micro-batch 0."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of `str`. Raises ScheduleError when any character is left over."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an action",
                why="an action is STAGE, one of F B I W, MICROBATCH, as in 2F0",
                hint="keep compute actions only; lower() adds the communication",
            )
        return cls(int(match[1]), Kind(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class Schedule:
    """Per device, the ordered list of its actions. `placement[s]` is the device of stage s."""

    n_stages: int
    n_microbatches: int
    placement: tuple[int, ...]
    rows: tuple[tuple[Action, ...], ...]
    name: str = field(default="custom", compare=False)

    @property
    def n_devices(self) -> int:
        return len(self.rows)

    def to_csv(self) -> str:
        """One row per device, one cell per action; the compute-only form of torch.distributed.pipelining."""
        return "".join(",".join(map(str, row)) + "\n" for row in self.rows)

    __str__ = to_csv

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> Schedule:
        """Read `to_csv`'s form; empty cells (idle ticks) are skipped. Raises ScheduleError naming row and column."""
        lines = text.removesuffix("\n").split("\n")
        rows = tuple(_parse_row(line, number) for number, line in enumerate(lines))
        actions = [(action, device) for device, row in enumerate(rows) for action in row]
        if not actions:
            raise ScheduleError("the CSV holds no action", hint="one row per device, cells such as 0F0,0F1,0B0,0B1")
        home: dict[int, int] = {}
        for action, device in actions:
            if home.setdefault(action.stage, device) != device:
                raise ScheduleError(
                    f"stage {action.stage} is on device {home[action.stage]} and on device {device}",
                    where=f"row {device}, action {action}",
                    hint="keep all actions of a stage in one row",
                )
        missing = next((stage for stage in range(len(home)) if stage not in home), None)
        if missing is not None:
            raise ScheduleError(
                f"no row holds an action of stage {missing}", why=f"stages 0 to {max(home)} are expected"
            )
        placement = tuple(home[stage] for stage in range(len(home)))
        return cls(len(home), max(a.microbatch for a, _ in actions) + 1, placement, rows, name)


def _parse_row(line: str, row: int) -> tuple[Action, ...]:
    actions = []
    for column, cell in enumerate(line.split(",")):
        if not (cell := cell.strip()):
            continue
        try:
            actions.append(Action.parse(cell))
        except ScheduleError as error:
            raise ScheduleError(
                error.what, where=f"row {row}, column {column}", why=error.why, hint=error.hint
            ) from None
    return tuple(actions)


@dataclass(frozen=True, slots=True)
class Route:
    """One value and everybody who needs it: it goes from its source straight to each consumer's device, once.

    `source` is the producing stage, or HOST for an input of the model; `consumers` are stages in ascending order, with
    HOST at the end when the value is an output. `nbytes` is its size for one micro-batch. When `gradient` holds, each
    consumer computes a gradient that goes straight back.
    """

    value: str
    source: int
    consumers: tuple[int, ...]
    nbytes: float = 0.0
    gradient: bool = True

    @property
    def skips(self) -> tuple[int, ...]:
        """The consumers that the value reaches by passing over stages."""
        return () if self.source == HOST else tuple(c for c in self.consumers if c != HOST and c > self.source + 1)

    def __str__(self) -> str:
        ends = "".join(f" {place(consumer)}" for consumer in self.consumers)
        size = int(self.nbytes) if float(self.nbytes).is_integer() else self.nbytes
        return f"route {self.value}: {place(self.source)} ->{ends}, {size} bytes{', gradient' * self.gradient}"


@dataclass(frozen=True, slots=True)
class Value:
    """A micro-batch's copy of a named value, or, with `consumer`, the gradient of it that the consumer sends back."""

    name: str
    microbatch: int
    consumer: int | None = None

    def __str__(self) -> str:
        tick = "" if self.consumer is None else f"'{place(self.consumer)}"
        return f"{self.name}{tick}#{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Operand:
    """A value together with the buffer that holds it, once buffers are assigned."""

    value: Value
    slot: int | None = None

    def __str__(self) -> str:
        return str(self.value) if self.slot is None else f"{self.value}[{self.slot}]"


class Op(Enum):
    """What an instruction does."""

    COMPUTE = "COMPUTE"
    SEND = "SEND"
    RECV = "RECV"
    FREE = "FREE"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a device's program. SEND and FREE read one operand, RECV writes one, COMPUTE carries an action."""

    op: Op
    reads: tuple[Operand, ...] = ()
    writes: tuple[Operand, ...] = ()
    action: Action | None = None
    peer: int | None = None

    def __str__(self) -> str:
        reads, writes = " ".join(map(str, self.reads)), " ".join(map(str, self.writes))
        match self.op:
            case Op.COMPUTE:
                return f"{self.action} {reads}{' ' * bool(reads)}->{' ' * bool(writes)}{writes}"
            case Op.SEND:
                return f"SEND {reads} to {place(self.peer)}"
            case Op.RECV:
                return f"RECV {writes} from {place(self.peer)}"
            case Op.FREE:
                return f"FREE {reads}"


@dataclass(frozen=True, slots=True)
class Program:
    """Per device, the ordered list of everything it does for one mini-batch, and the routes that this serves."""

    n_stages: int
    n_microbatches: int
    placement: tuple[int, ...]
    routes: tuple[Route, ...]
    rows: tuple[tuple[Instruction, ...], ...]

    @property
    def n_devices(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        """The text that `program_text.parse_program` reads back."""
        placement = "".join(f" {device}" for device in self.placement)
        lines = [f"program: {self.n_stages} stages on devices{placement}, {self.n_microbatches} micro-batches"]
        lines += map(str, self.routes)
        for device, row in enumerate(self.rows):
            lines.append(f"device {device}")
            lines += (f"  {instruction}" for instruction in row)
        return "\n".join(lines) + "\n"


def saved(stage: int, microbatch: int) -> Value:
    """What the forward of `stage` keeps for its backward: `@s#m`."""
    return Value(f"@{stage}", microbatch)


def chain(n_stages: int) -> tuple[Route, ...]:
    """The routes of a plain pipeline: every stage hands one value to the next; v0 goes from stage 0 to stage 1."""
    return tuple(Route(f"v{stage}", stage, (stage + 1,)) for stage in range(n_stages - 1))


def place(end: int | None) -> str:
    """How a route's end is written: a number, or the word for the host."""
    return "host" if end == HOST else str(end)
