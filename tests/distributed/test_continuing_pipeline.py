"""Copies of a pipeline that are lost: the others go on, equal to one process over the samples that are left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.losses_of_copies import FULL, TRIALS

ROOT = Path(__file__).parents[2]


def wrong(folder: Path, names: list[str]) -> dict[str, list[str]]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    script = str(ROOT / "tests" / "distributed" / "losses_of_copies.py")
    ran = subprocess.run([sys.executable, script, str(folder), *names], env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
                         timeout=3000, capture_output=True, check=False)  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:].decode()
    return dict(json.loads(ran.stdout.splitlines()[-1]))


def test_the_copies_that_are_left_go_on_as_one_process_would(tmp_path: Path) -> None:
    """Every kind of end, in a step and between steps: losses, weights, momenta, statistics and random numbers are those of eager."""
    assert wrong(tmp_path, [*TRIALS]) == {name: [] for name in TRIALS}


def test_every_end_in_every_phase(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--full"):
        pytest.skip("65 trainings: --full")
    assert wrong(tmp_path, [*FULL]) == {name: [] for name in FULL}
