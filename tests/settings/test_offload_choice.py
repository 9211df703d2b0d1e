from __future__ import annotations

from typing import Any

import pytest

from pipecompile.errors import InputError
from pipecompile.ir.written_program import WrittenProgram
from pipecompile.passes import lower
from pipecompile.schedules import build_schedule
from pipecompile.settings.offload_choice import check_offload


@pytest.mark.parametrize("checkpoint", ["never", (False, False)])
@pytest.mark.parametrize("schedule", ["1f1b", build_schedule("gpipe", 2, 4)])
def test_a_schedule_without_recomputation_is_accepted(schedule: Any, checkpoint: Any) -> None:
    check_offload(schedule, checkpoint, "each")


@pytest.mark.parametrize(
    ("schedule", "checkpoint", "across_batch", "words"),
    [
        ("auto", "never", None, 'schedule="1f1b"'),
        ("1f1b", "auto", None, "recomputed or offloaded, not both"),
        ("1f1b", (True, False), None, "one of the two"),
        ("gpipe", "never", "exact", "two programs"),
        (WrittenProgram.of(lower(build_schedule("1f1b", 2, 4))), "never", None, "a Program"),
    ],
)
def test_what_offload_excludes_is_refused(schedule: Any, checkpoint: Any, across_batch: Any, words: str) -> None:
    with pytest.raises(InputError, match="offload=True is given together with") as caught:
        check_offload(schedule, checkpoint, across_batch)
    assert words in str(caught.value)
