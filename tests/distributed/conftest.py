from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def single_rank() -> Iterator[None]:
    """A process group of this process alone, under gloo, with a store in memory."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20))
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return, per script of SCRIPTS in the module, the error or the result of each rank; see rank_scripts.py."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    script, folder = str(ROOT / "tests/distributed/rank_scripts.py"), str(tmp_path_factory.mktemp("scripts"))
    command = [sys.executable, script, folder, *request.module.SCRIPTS]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    ran = subprocess.run(command, env=environment, timeout=600, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:].decode()
    return dict(json.loads(ran.stdout.splitlines()[-1]))
