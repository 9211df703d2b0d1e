from __future__ import annotations

from dataclasses import replace

import pytest

from pipecompile.errors import ScheduleError
from pipecompile.schedules.building_blocks import loop
from pipecompile.schedules.search.recompute_choices import recompute_flag_sets
from pipecompile.schedules.search.workload import unit_workload

WORK = replace(unit_workload(loop(3, 3)), recipe=(0.0,) * 3)


def sets(checkpoint: str | list[bool], room: float) -> list[tuple[bool, ...]]:
    return list(recompute_flag_sets(WORK, (room,) * 3, checkpoint))


def test_as_told() -> None:
    assert sets("never", 1) == [(False,) * 3]
    assert sets("always", 9) == [(True,) * 3]
    assert sets([True, False, True], 9) == [(True, False, True)]


def test_auto_recomputes_nothing_first_then_what_has_to_be_then_all() -> None:
    """With room for one, stage 0 needs more than that; stage 1 as well, once there are to be more than just enough."""
    few = [(False, False, False), (True, False, False)]
    assert sets("auto", 1) == [*few, (True, True, False), (True, True, True)]
    assert sets("auto", 3) == [*few, (True, True, True)]
    assert sets("auto", 99) == [(False,) * 3, (True,) * 3]


def test_other_modes_are_refused() -> None:
    with pytest.raises(ScheduleError, match="checkpoint='except_last' is not known"):
        sets("except_last", 1)
    with pytest.raises(ScheduleError, match=r"checkpoint=\[True\] is not known"):
        sets([True], 1)
