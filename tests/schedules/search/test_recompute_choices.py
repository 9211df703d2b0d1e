from __future__ import annotations

import itertools
import random
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


def test_auto_tries_the_stages_with_which_one_micro_batch_holds_the_least() -> None:
    """0F 1F 1B 0R 0B holds 5 bytes without the recomputation of stage 1, and 1 + 5 with it."""
    work = replace(unit_workload((0, 0)), saved=(4.0, 5.0), recipe=(0.0, 1.0), recompute=(2.0, 1.0))
    assert (True, False) in list(recompute_flag_sets(work, (5.5,), "auto"))


@pytest.mark.parametrize("seed", range(20))
def test_no_choice_holds_less_with_one_micro_batch(seed: int) -> None:
    draw = random.Random(seed)
    saved, recipe = [tuple(float(draw.randint(0, most)) for _ in range(4)) for most in (9, 3)]
    work = replace(unit_workload((0,) * 4), saved=saved, recipe=recipe)

    def peak(flags: tuple[bool, ...]) -> float:
        kept = [r if flag else s for s, r, flag in zip(saved, recipe, flags, strict=True)]
        restored = [sum(kept[: t + 1]) + saved[t] for t, flag in enumerate(flags) if flag]
        return max(sum(kept), *restored, 0.0)

    tried = list(recompute_flag_sets(work, (0.0,), "auto"))
    assert min(map(peak, tried)) == min(map(peak, itertools.product((False, True), repeat=4)))
