from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import pipecompile as pc
from pipecompile.parameters import checkpoint_retention
from pipecompile.parameters.checkpoint_retention import abandon_later, remove_old

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def saved(folder: Path, *steps: int, keep: int | None = None) -> Path:
    """Save checkpoints of these steps; return the last one."""
    for step in steps:
        path = pc.save_checkpoint({"a": torch.full((2,), float(step))}, folder, step, keep=keep).result()
        assert path.exists()
        assert pc.latest_checkpoint(folder) == path
        assert (folder / "last_good").read_text() == path.name
    return path


def numbers(folder: Path) -> list[int]:
    return sorted(int(path.parent.name) for path in folder.glob("*/.metadata"))


def cut_off(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:100])


@pytest.mark.parametrize(
    ("steps", "keep", "left"),
    [
        ([200, 300, 400, 150], 3, [150, 300, 400]),
        ([200, 300, 400, 150, 160], 3, [150, 160, 400]),
        ([200, 300, 400, 150, 160, 170], 3, [150, 160, 170]),
        ([200, 300, 400, 150], 1, [150]),
        ([200, 300, 150, 300], 2, [150, 300]),
        ([99_999_999, 100_000_000], 1, [100_000_000]),
        ([99_999_998, 99_999_999, 100_000_000, 100_000_001], 2, [100_000_000, 100_000_001]),
    ],
)
def test_what_was_saved_last_is_the_latest_and_stays(
    steps: Sequence[int], keep: int, left: list[int], tmp_path: Path
) -> None:
    """The highest names stayed, as texts, whatever had been written last."""
    saved(tmp_path, *steps, keep=keep)
    assert numbers(tmp_path) == left


def test_a_damaged_checkpoint_takes_the_place_of_no_whole_one(tmp_path: Path) -> None:
    """Of 30, 40 and 35, `keep=1` left 40 alone, which was damaged."""
    cut_off(saved(tmp_path, 30, 40))
    saved(tmp_path, 35, keep=2)
    assert numbers(tmp_path) == [30, 35]
    cut_off(saved(tmp_path, 45))
    saved(tmp_path, 50, keep=3)
    assert numbers(tmp_path) == [30, 35, 50]


def test_nothing_is_removed_while_too_few_are_whole(tmp_path: Path) -> None:
    cut_off(saved(tmp_path, 10, 20))
    saved(tmp_path, 30, keep=3)
    assert numbers(tmp_path) == [10, 20, 30]


def test_without_keep_a_run_that_goes_back_removes_nothing(tmp_path: Path) -> None:
    saved(tmp_path, 200, 300, 150, 160, 250)
    assert numbers(tmp_path) == [150, 160, 200, 250, 300]
    cut_off(tmp_path / "00000250")
    with pytest.warns(UserWarning, match="00000250 is damaged"):
        assert pc.latest_checkpoint(tmp_path) == tmp_path / "00000160"


def test_a_number_that_is_reached_again_is_of_the_present_run(tmp_path: Path) -> None:
    saved(tmp_path, 200, 300, 150)
    path = tmp_path / "00000300"
    assert (path / "abandoned").exists()
    abandon_later(path)
    assert pc.latest_checkpoint(tmp_path) == path


def test_a_stop_between_two_marks_leaves_the_highest_number_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 200, 300, 400)
    touch, left = Path.touch, [0]

    def stopped(path: Path) -> None:
        if left[0] == 2:
            raise OSError("stopped")
        left[0] += 1
        touch(path)

    monkeypatch.setattr(Path, "touch", stopped)
    with pytest.raises(pc.InputError, match="00000150 cannot be written"):
        pc.save_checkpoint({"a": torch.ones(2)}, tmp_path, 150)
    assert pc.latest_checkpoint(tmp_path) == tmp_path / "00000400"


def test_higher_numbers_that_other_programs_wrote_stay(tmp_path: Path) -> None:
    path = saved(tmp_path, 10, 20)
    (tmp_path / "00000030").mkdir()
    (tmp_path / "00000030" / ".metadata").write_bytes(b"")
    remove_old(path, 1)
    assert numbers(tmp_path) == [20, 30]
    assert not checkpoint_retention._is_whole(tmp_path / "00000030")
