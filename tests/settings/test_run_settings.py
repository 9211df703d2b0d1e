"""Options of a run: schedules in every form, and recomputation per mode or per stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipecompile.errors import InputError, ScheduleError
from pipecompile.ir.written_program import WrittenProgram
from pipecompile.passes import lower
from pipecompile.passes.split_backward import split_backward
from pipecompile.passes.user_passes import UserPass
from pipecompile.schedules import build_schedule
from pipecompile.settings.run_settings import RunSettings, load_schedule


def settings(**changes: Any) -> RunSettings:
    usual = {
        "schedule": "1f1b",
        "checkpoint": "never",
        "restored": 1,
        "offload": False,
        "dispatch": "auto",
        "gradient_sums": "eager",
        "passes": (),
        "compile_stages": False,
    }
    return RunSettings(
        **(usual | {"cuda_graphs": False, "check": True, "cache_size": 16, "progress": True, "init": ()} | changes)
    )


def test_a_schedule_is_a_name_a_schedule_a_builder_or_a_file(tmp_path: Path) -> None:
    built = build_schedule("gpipe", 2, 4)
    built.save(tmp_path / "mine.csv")
    assert load_schedule("auto") == "auto"
    assert load_schedule(built) is built
    assert load_schedule(build_schedule) is build_schedule
    assert load_schedule(tmp_path / "mine.csv").rows == load_schedule(str(tmp_path / "mine.csv")).rows == built.rows


def test_a_program_and_its_file_are_a_written_program(tmp_path: Path) -> None:
    program = lower(build_schedule("gpipe", 2, 4))
    program.save(tmp_path / "mine.txt")
    for value in (program, tmp_path / "mine.txt", str(tmp_path / "mine.txt")):
        written = load_schedule(value)
        assert isinstance(written, WrittenProgram)
        assert written.program == program
        assert load_schedule(written) is written


@pytest.mark.parametrize(
    ("name", "nearest"), [("1f1", "1f1b"), ("ZBV", "zbv"), ("magic", "mario"), ("gpipes", "gpipe")]
)
def test_an_unknown_schedule_gets_the_nearest_name(name: str, nearest: str) -> None:
    with pytest.raises(ScheduleError, match="is not known") as caught:
        load_schedule(name)
    assert caught.value.hint.startswith(f"schedule={nearest!r}")
    assert "'zb-h1'" in caught.value.why


def test_a_function_among_passes_is_placed_last() -> None:
    mine = UserPass(split_backward, before="compute")
    assert settings(passes=[mine, len]).passes == (mine, UserPass(len))
    assert settings(passes=(mine,)).passes == (mine,)
    with pytest.raises(InputError, match="two passes are called 'len'"):
        settings(passes=[len, UserPass(len, before="slots")])


def test_checkpoint_is_a_mode_or_a_flag_per_stage() -> None:
    assert settings(checkpoint="except_last").checkpoint == "except_last"
    assert settings(checkpoint=[np.bool_(True), False]).checkpoint == (True, False)
    assert settings(checkpoint=(1, 0)).checkpoint == (True, False)
    for value in (True, ["never", "always"], [2], None):
        with pytest.raises(ScheduleError, match="a mode nor a flag per stage"):
            settings(checkpoint=value)


def test_stages_are_compiled_by_default_or_a_named_backend() -> None:
    assert [settings(compile_stages=value).compile_stages for value in (True, False, "eager")] == [True, False, "eager"]
    with pytest.raises(InputError, match="compile_stages=1 is not True or False"):
        settings(compile_stages=1)
