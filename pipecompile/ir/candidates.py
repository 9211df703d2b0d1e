"""What was compared to choose the number of micro-batches, the schedule and the recomputation together."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Candidate", "Considered"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One choice. `bottleneck` is the slowest stage for one micro-batch, `seconds` the simulated step, `memory` the most that
    each device holds, `recompute` a flag per stage; None and empty where that is not known. `left_out` says why it cannot
    be chosen; empty when it can. Without a `schedule` no schedule of so many micro-batches can.
    """

    n_microbatches: int
    schedule: str = ""
    recompute: tuple[bool, ...] = ()
    bottleneck: float | None = None
    seconds: float | None = None
    memory: tuple[float, ...] = ()
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class Considered:
    """All candidates, by number of micro-batches, and the place of the one that was chosen. Prints as a table."""

    rows: tuple[Candidate, ...]
    chosen: int

    @property
    def best(self) -> Candidate:
        """The one that was chosen: no other that fits has a shorter step."""
        return self.rows[self.chosen]

    def __str__(self) -> str:
        from pipecompile.show.candidate_table import considered_table
        from pipecompile.show.table import render

        return render(considered_table(self), width=120)
