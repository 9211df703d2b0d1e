"""Keywords that a schedule with several copies of each stage excludes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipecompile.errors import ScheduleError
from pipecompile.schedules import build_schedule
from pipecompile.settings.direction_choice import EXCLUDED, check_directions, copies_of_stages
from tests.support.compilations import options_of

VALUES: dict[str, Any] = {"memory_limit": 1e9, "offload": True}


@pytest.mark.parametrize("name", VALUES)
def test_keywords_that_it_excludes(name: str) -> None:
    with pytest.raises(
        ScheduleError, match=f"'chimera', with 2 copies of each stage, is given together with {name}"
    ) as caught:
        options_of(schedule="chimera", n_microbatches=4, **{name: VALUES[name]})
    assert caught.value.why == EXCLUDED[name]
    assert caught.value.hint


def test_copies_share_the_memory_of_parameters() -> None:
    schedule, devices = build_schedule("chimera", 2, 4), (torch.device("cpu"), torch.device("cuda", 0))
    options = SimpleNamespace(**dict.fromkeys(EXCLUDED), devices=devices)
    with pytest.raises(ScheduleError, match="puts the copies of stage 0 on cpu and cuda:0") as caught:
        check_directions(schedule, options)
    assert caught.value.hint == 'devices=["cpu"] * 2; or schedule="interleaved" with more stages'
    check_directions(schedule, SimpleNamespace(**dict.fromkeys(EXCLUDED), devices=devices[:1] * 2))


def test_the_number_of_copies() -> None:
    assert copies_of_stages(options_of(schedule="chimera")) == 2
    assert copies_of_stages(options_of()) == 1
    check_directions(build_schedule("1f1b", 2, 2), options_of(memory_limit=1e9))
