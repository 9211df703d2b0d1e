"""`reshard_after_forward=True` beside other keywords."""

from __future__ import annotations

from typing import Any

import pytest

from pipecompile.errors import InputError
from pipecompile.ir.written_program import WrittenProgram
from pipecompile.passes import lower
from pipecompile.schedules import build_schedule
from pipecompile.settings.reshard_choice import check_reshard

PROGRAM = WrittenProgram.of(lower(build_schedule("1f1b", 2, 4)))


@pytest.mark.parametrize("schedule", ["1f1b", build_schedule("gpipe", 2, 2)])
def test_sharded_parameters_can_be_freed(schedule: Any) -> None:
    check_reshard(2, schedule, offload=False, across_batch="each")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shards": 1}, "without a mesh that has dp_shard"),
        ({"schedule": "auto"}, 'together with schedule="auto"'),
        ({"schedule": PROGRAM}, "together with a Program"),
        ({"offload": True}, "together with offload=True"),
        ({"across_batch": "exact"}, 'together with across_batch="exact"'),
    ],
)
def test_what_it_excludes_is_refused(changes: dict[str, Any], words: str) -> None:
    usual: dict[str, Any] = {"shards": 2, "schedule": "1f1b", "offload": False, "across_batch": None}
    with pytest.raises(InputError, match=f"reshard_after_forward=True is given {words}") as caught:
        check_reshard(**usual | changes)
    assert caught.value.why
    assert caught.value.hint
