"""An action: one cell of a schedule, the computation of one stage on one micro-batch.

action := STAGE KIND MICROBATCH                  2F0 is the forward of stage 2 on micro-batch 0
KIND   := "F" | "R" | "B" | "I" | "W" | "OFFLOAD" | "RELOAD"
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from pipecompile.errors import ScheduleError

__all__ = ["BACKWARDS", "Action", "Kind"]


class Kind(Enum):
    """The computation of an action.

    BACKWARD does the work of INPUT_GRAD and WEIGHT_GRAD in one call of autograd. RECOMPUTE runs the forward again
    before the backward, if the forward kept only its inputs. OFFLOAD copies what the forward saved to the host, and RELOAD copies
    it back; neither computes.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    RECOMPUTE = "R"
    OFFLOAD = "OFFLOAD"
    RELOAD = "RELOAD"

    __hash__ = (
        object.__hash__
    )  # Enum.__hash__ is Python code, and dictionaries keyed by Kind are read millions of times


BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD)
"""The kinds that read what a forward saved, and send gradients of inputs."""

_ACTION = re.compile(r"([0-9]{1,9})([FBIWR]|OFFLOAD|RELOAD)([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class Action:
    """One cell of a schedule: `2F0` is the forward of stage 2 on micro-batch 0."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind._value_}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action whose `str` is `text`. Raise ScheduleError if any character is left over."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an action",
                why="an action is STAGE, one of F R B I W OFFLOAD RELOAD, MICROBATCH, as in 2F0",
            )
        return cls(int(match[1]), Kind(match[2]), int(match[3]))
