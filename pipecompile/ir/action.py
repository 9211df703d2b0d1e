"""An action: one cell of a schedule, the computation of one stage on one micro-batch.

action := STAGE KIND MICROBATCH                  2F0 is the forward of stage 2 on micro-batch 0
        | STAGE KIND MICROBATCH "." SLICE        2F0.1 is the forward of stage 2 on slice 1 of micro-batch 0
        | STAGE SHARDING                         2UNSHARD gathers the parameters of stage 2, for all micro-batches after it
KIND   := "F" | "R" | "B" | "I" | "W" | "OFFLOAD" | "RELOAD"
SHARDING := "UNSHARD" | "RESHARD" | "REDUCE_GRAD"
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from pipecompile.errors import ScheduleError

__all__ = ["BACKWARDS", "NO_MICROBATCH", "NO_SLICE", "SHARDING", "UNTRAINED", "Action", "Kind"]


class Kind(Enum):
    """The computation of an action.

    BACKWARD does the work of INPUT_GRAD and WEIGHT_GRAD in one call of autograd. RECOMPUTE runs the forward again
    before the backward, if the forward kept only its inputs. OFFLOAD copies what the forward saved to the host, and RELOAD copies
    it back; neither computes. UNSHARD starts to gather the parameters that copies of the pipeline shard, RESHARD frees them, and
    REDUCE_GRAD starts to sum their gradients over the copies: actions of a stage without a micro-batch.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    RECOMPUTE = "R"
    OFFLOAD = "OFFLOAD"
    RELOAD = "RELOAD"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"

    __hash__ = (
        object.__hash__
    )  # Enum.__hash__ is Python code, and dictionaries keyed by Kind are read millions of times


BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD)
"""The kinds that read what a forward saved, and send gradients of inputs."""

SHARDING = (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD)
"""The kinds of actions on the parameters of a stage, which have no micro-batch."""

UNTRAINED = frozenset((Kind.FORWARD, *SHARDING))
"""The kinds of actions that a schedule without a backward may have."""

NO_MICROBATCH = -1
"""The micro-batch of an action of SHARDING, which has none. Another action may have this number while it is counted from a later one."""

NO_SLICE = -1
"""The slice of an action on a whole micro-batch, and of an action of SHARDING."""

_ACTION = re.compile(
    r"([0-9]{1,9})(?:([FBIWR]|OFFLOAD|RELOAD)([0-9]{1,9})(?:\.([0-9]{1,9}))?|(UNSHARD|RESHARD|REDUCE_GRAD))"
)

_SHOWN_CELLS = 4
"""Number of cells that a hint shows of a line whose cells no comma separates."""


@dataclass(frozen=True, slots=True)
class Action:
    """One cell of a schedule: `2F0` is the forward of stage 2 on micro-batch 0. `2UNSHARD` has no micro-batch.

    `2F0.1` computes slice 1 of micro-batch 0 alone: a part of its positions along the sequence.
    """

    stage: int
    kind: Kind
    microbatch: int = NO_MICROBATCH
    slice: int = NO_SLICE

    def __str__(self) -> str:
        if self.slice != NO_SLICE:
            return f"{self.stage}{self.kind._value_}{self.part}"
        has_none = self.microbatch == NO_MICROBATCH and self.kind in SHARDING
        return f"{self.stage}{self.kind._value_}{'' if has_none else self.microbatch}"

    @property
    def cell(self) -> tuple[int, int, int]:
        """Return (stage, micro-batch, slice): what F, R, B, I, W, OFFLOAD and RELOAD of the same cell have in common."""
        return self.stage, self.microbatch, self.slice

    @property
    def part(self) -> str:
        """Return the text of the micro-batch, or of the micro-batch and the slice: `0`, or `0.1`."""
        return f"{self.microbatch}" if self.slice == NO_SLICE else f"{self.microbatch}.{self.slice}"

    def unit(self, n_slices: int) -> int:
        """Return the number of the slice among the slices of all micro-batches, of which each has `n_slices`."""
        return self.microbatch if n_slices == 1 else self.microbatch * n_slices + self.slice

    def later(self, microbatches: int) -> Action:
        """Return the action with a number of micro-batch higher by `microbatches`; an action of SHARDING has none and stays as it is."""
        if self.kind in SHARDING:
            return self
        return Action(self.stage, self.kind, self.microbatch + microbatches, self.slice)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action whose `str` is `text`. Raise ScheduleError if any character is left over."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an action",
                why="an action is STAGE, one of F R B I W OFFLOAD RELOAD, MICROBATCH, as in 2F0, or MICROBATCH.SLICE, as in 2F0.1; or STAGE, one of UNSHARD RESHARD REDUCE_GRAD",
                hint=_likely(text),
            )
        if match[5] is not None:
            return cls(int(match[1]), Kind(match[5]))
        return cls(int(match[1]), Kind(match[2]), int(match[3]), NO_SLICE if match[4] is None else int(match[4]))


def _likely(text: str) -> str:
    """Return what a cell that is not an action probably means: other case, quotes or blanks, or cells that no comma separates; else an empty text."""
    cells = [re.sub(r"[\s'\"]", "", part).upper() for part in re.split(r"[;|\t]|(?<=[0-9])\s+(?=[0-9])", text[:1000])]
    if not all(map(_ACTION.fullmatch, cells)):
        return ""
    return ",".join(cells) if len(cells) <= _SHOWN_CELLS else ",".join(cells[:_SHOWN_CELLS]) + ",..."
