"""Faults of ranks: one raises, is killed or stalls. benchmarks/faults.py runs a hundred of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tests.distributed import fault_phases, faults
from tests.support.warm_python import WarmPython

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "tests" / "distributed" / "faults.py")
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
}
LIMIT = 300.0


def test_all_ranks_report_a_fault_and_a_new_start_resumes(tmp_path: Path, warm_python: WarmPython) -> None:
    """Every rank ends in time with an error that names rank and action; then losses are bit for bit those without a fault."""
    printed = warm_python.run("tests.distributed.faults", str(tmp_path), timeout=LIMIT)
    names = [f"{kind}{where}" for where in ("", ", copies", ", direct") for kind in faults.KINDS] + [
        "again",
        *fault_phases.SAMPLE,
    ]
    assert json.loads(printed.splitlines()[-1]) == {name: [] for name in names}


def test_torchrun_starts_a_killed_training_again(tmp_path: Path) -> None:
    job = faults.Job("1f1b", 2, faults.Fault("kill", 1, 2, 10))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command = [*torchrun, "--monitor-interval=0.2", SCRIPT, str(tmp_path), json.dumps(asdict(job))]
    ran = subprocess.run(command, env=ENVIRONMENT, timeout=LIMIT, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert (tmp_path / "fault.json").exists()
    trial = faults.Trial(job, tmp_path)
    expected = losses_of_eager()
    for rank in range(2):
        assert list(trial.losses[rank]) == list(range(faults.STEPS))
        assert list(trial.losses[rank].values()) == pytest.approx(expected, rel=1e-5)
        ran_twice = [json.loads(line)[0] for line in (tmp_path / f"{rank}.jsonl").read_text().splitlines()]
        assert ran_twice == list(range(faults.STEPS))  # only the step of the fault was begun again


def losses_of_eager() -> list[float]:
    torch.manual_seed(0)
    batches, model = torch.randn(faults.STEPS, 10, 8), faults.Net(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x in batches:
        loss = faults.square(model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
