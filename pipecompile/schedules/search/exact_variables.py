"""The variables of the exact model: what `exact_model.py` builds, and others add to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipecompile.ir import Kind
from pipecompile.schedules.search.ticks import Tick

__all__ = ["Copy", "ExactModel", "Key"]

Key = tuple[Kind, int, int]
"""Kind, stage and micro-batch. The backward of a cell has the key of I, whether it is I or B."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A message that takes time: when it leaves, its ticks, the engines that it occupies, and the end of the action that sends it."""

    leaves: Any
    ticks: int
    engines: tuple[object, ...]
    ready: Any


@dataclass(slots=True)
class ExactModel:
    """A model of CP-SAT with its variables: start, end and presence per action, and the makespan in ticks."""

    model: Any
    tick: Tick
    makespan: Any
    start: dict[Key, Any] = field(default_factory=dict)
    end: dict[Key, Any] = field(default_factory=dict)
    is_whole: dict[tuple[int, int], Any] = field(default_factory=dict)
    """Per stage and micro-batch, whether the backward is B. No entry if it is not free: then it is I and W, or B without a split."""
    recomputes: dict[int, Any] = field(default_factory=dict)
    """Per stage, whether it recomputes, if that is free."""
    arrivals: dict[Key, list[Any]] = field(default_factory=dict)
    """Per action, when the values that it reads arrive."""
    copies: list[Copy] = field(default_factory=list)
    split: bool = True

    @property
    def has_options(self) -> bool:
        """Whether some actions may be left out: R, or I and W in the place of B."""
        return bool(self.recomputes or self.is_whole)

    def least_above(self, seconds: float) -> float:
        """Return the shortest makespan that is left if none takes `seconds` or less: with whole ticks, the next one."""
        return (self.tick.down(seconds) + 1) * self.tick.size if self.tick.is_exact else seconds
