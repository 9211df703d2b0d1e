"""Schedules of the catalogue that a search compares with its own: all that train, recompute and offload nothing, and do not overlap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipecompile.ir import Kind, Route, Schedule
from pipecompile.schedules.catalogue import CATALOGUE

__all__ = ["catalogue_candidates"]

_COMPUTE = {Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD}


def catalogue_candidates(
    n_stages: int, n_microbatches: int, n_devices: int, routes: Sequence[Route], *, split: bool
) -> Iterator[Schedule]:
    """Yield the catalogue's schedules for these counts, of the DAG that `routes` make and of a chain. `split` permits I and W."""
    for entry in CATALOGUE.values():
        if entry.has_slices or entry.has_copies or not entry.suits(n_stages, n_devices):
            continue
        of_dag, of_chain = (entry.schedule(n_stages, n_microbatches, n_devices, r) for r in (routes, None))
        for schedule in (of_dag,) if of_dag == of_chain else (of_dag, of_chain):
            if _is_compared(schedule) and (split or not schedule.is_split):
                yield schedule


def _is_compared(schedule: Schedule) -> bool:
    """Return whether the schedule only computes, with one copy of each stage, and without overlaps: swaps would part them."""
    kinds = {action.kind for row in schedule.rows for action in row}
    return not (schedule.overlaps or schedule.directions) and kinds <= _COMPUTE and len(kinds) > 1
