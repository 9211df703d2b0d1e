"""Copies of a pipeline that are lost: the others go on, equal to one process over the samples that are left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import pipecompile as pc
from pipecompile.distributed.lost_copies import check_lost_copies
from pipecompile.distributed.rank_mesh import RankMesh
from pipecompile.errors import InputError, LostCopyWarning
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


# -- what is refused --------------------------------------------------------------------------------------------------


def ranks_of(*names: str) -> RankMesh:
    """Return a mesh of this rank as if there were two copies of one rank each."""
    ranks = RankMesh.of(init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names))
    return replace(ranks, copies=((0,), (1,)), left=(0, 1), members=(0, 1))


def refusal(model: nn.Module, ranks: RankMesh | None) -> str:
    with pytest.raises(InputError) as caught:
        check_lost_copies(model, ranks)
    return str(caught.value)


@pytest.mark.usefixtures("single_rank")
def test_what_no_copy_can_lose_is_refused() -> None:
    layer, two = nn.Linear(2, 2), ranks_of("dp", "pp")
    assert "without copies of the pipeline" in refusal(layer, None)
    assert "without copies of the pipeline" in refusal(layer, RankMesh.of(None))
    assert "with sharded parameters" in refusal(layer, replace(two, shard_mesh=init_device_mesh("cpu", (1,))))
    assert 'a mesh with "tp"' in refusal(layer, replace(two, tensor_group=two.group))
    assert "on ranks of 'cuda'" in refusal(layer, replace(two, device_type="cuda"))
    assert "SyncBatchNorm" in refusal(nn.Sequential(nn.SyncBatchNorm(2)), two)
    with warnings.catch_warnings(action="error"):
        check_lost_copies(layer, two)


@pytest.mark.usefixtures("single_rank")
def test_one_agent_of_torchrun_for_several_copies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TORCHELASTIC_RUN_ID", "job"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    two = replace(ranks_of("dp", "pp"), copy=(0,))
    with pytest.warns(LostCopyWarning, match="rank 0 and rank 1 of another copy"):
        check_lost_copies(nn.Linear(2, 2), two)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with warnings.catch_warnings(action="error"):
        check_lost_copies(nn.Linear(2, 2), two)


@pytest.mark.parametrize(
    ("value", "says"), [("continue", "without copies"), ("go on", "is not known"), (True, "is not known")]
)
def test_compile_refuses_it_in_one_process(value: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        pc.compile(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2, devices=["cpu", "cpu"], lost_copies=value,
                   example_args=(torch.zeros(2, 2),))  # fmt: skip
