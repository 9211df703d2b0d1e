"""A schedule of slices beside other keywords."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipecompile.errors import ScheduleError
from pipecompile.passes.split_backward import split_backward
from pipecompile.schedules import build_schedule
from pipecompile.settings.slice_choice import EXCLUDED, check_slices
from tests.support.decoders import token_loss

SCHEDULE = build_schedule("seq1f1b", 2, 2, n_slices=2)
USUAL: dict[str, Any] = dict.fromkeys(EXCLUDED) | {"loss_fn": token_loss}


def test_a_schedule_with_whole_backwards_runs() -> None:
    check_slices(SCHEDULE, SimpleNamespace(**USUAL))
    check_slices(SCHEDULE, SimpleNamespace(**USUAL | {"across_batch": "each"}))


@pytest.mark.parametrize("name", EXCLUDED)
def test_keywords_that_it_excludes(name: str) -> None:
    value = "exact" if name == "across_batch" else True
    with pytest.raises(
        ScheduleError, match=f"'seq1f1b', of 2 slices per micro-batch, is given together with {name}"
    ) as caught:
        check_slices(SCHEDULE, SimpleNamespace(**USUAL | {name: value}))
    assert caught.value.why == EXCLUDED[name]
    assert caught.value.hint


def test_a_loss_function_is_needed() -> None:
    with pytest.raises(ScheduleError, match="is given without loss_fn"):
        check_slices(SCHEDULE, SimpleNamespace(**USUAL | {"loss_fn": None}))


def test_divided_backwards_are_refused() -> None:
    with pytest.raises(ScheduleError, match="has divided backwards, I and W"):
        check_slices(split_backward(SCHEDULE), SimpleNamespace(**USUAL))
