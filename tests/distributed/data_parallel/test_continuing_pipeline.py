"""Copies of a pipeline that are lost: the others go on, equal to one process over the samples that are left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.losses_of_copies import FULL, TRIALS
from tests.support.warm_python import WarmPython


def wrong(process: WarmPython, folder: Path, names: list[str]) -> dict[str, list[str]]:
    printed = process.run("tests.distributed.losses_of_copies", str(folder), *names, timeout=3000)
    return dict(json.loads(printed.splitlines()[-1]))


def test_the_copies_that_are_left_go_on_as_one_process_would(tmp_path: Path, warm_python: WarmPython) -> None:
    """Every kind of end, in a step and between steps: losses, weights, momenta, statistics and random numbers are those of eager."""
    assert wrong(warm_python, tmp_path, [*TRIALS]) == {name: [] for name in TRIALS}


def test_every_end_in_every_phase(tmp_path: Path, warm_python: WarmPython, pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--full"):
        pytest.skip("65 trainings: --full")
    assert wrong(warm_python, tmp_path, [*FULL]) == {name: [] for name in FULL}
