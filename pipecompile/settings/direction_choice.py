"""Keywords that a schedule with several copies of each stage excludes."""

from __future__ import annotations

from typing import Any

from pipecompile.errors import ScheduleError
from pipecompile.ir import Schedule
from pipecompile.ir.directions import Placement, all_placements
from pipecompile.text.shown_value import shown

__all__ = ["EXCLUDED", "check_directions", "copies_of_stages", "other_placements"]

EXCLUDED: dict[str, str] = {
    "memory_limit": "the cut counts the parameters of one stage per device, and here there are those of several",
    "offload": "the cut counts what one stage per device saves, and here several do",
    "reshard_after_forward": "parameters are gathered and freed for one stage at a time, and several copies compute",
    "cuda_graphs": "a graph is captured for a stage on one device",
    "partitions": "several parts of a card would add to the gradients of one parameter at the same time",
}
"""Keywords that a schedule with several copies of its stages excludes, with the reason."""


def copies_of_stages(options: Any) -> int:
    """Return how many copies of each stage the schedule of these options has."""
    return 1 + len(other_placements(options))


def other_placements(options: Any) -> tuple[Placement, ...]:
    """Return the placements of the further copies of all stages that the schedule of these options has."""
    return all_placements(options.schedule_for(options.any_count, custom=False))[1:]


def check_directions(schedule: Schedule, options: Any) -> None:
    """Raise ScheduleError for keywords with which `schedule`, if it has several copies of each stage, cannot run."""
    if not schedule.directions:
        return
    what, why, hint = "", "", 'schedule="1f1b"'
    for name, reason in EXCLUDED.items():
        value = getattr(options, name)
        if not what and value is not None and value is not False and value != ():
            what, why = f"is given together with {name}={shown(value)}", reason
            hint = f'no {name}; or schedule="1f1b"'
    placements = all_placements(schedule)
    apart = [
        stage for stage, own in enumerate(zip(*placements, strict=True)) if len({options.devices[d] for d in own}) > 1
    ]
    if apart and not what:
        names = " and ".join(str(options.devices[placement[apart[0]]]) for placement in placements)
        what = f"puts the copies of stage {apart[0]} on {names}"
        why = "copies of a stage run on devices that share the memory of its parameters"
        hint = f'devices=["cpu"] * {len(options.devices)}; or schedule="interleaved" with more stages'
    if what:
        name = f"schedule {shown(schedule.name)}, with {len(placements)} copies of each stage,"
        raise ScheduleError(f"{name} {what}", why=why, hint=hint)
