from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from tests.support.warm_python import WarmPython


@pytest.fixture(scope="module")
def single_rank() -> Iterator[None]:
    """A process group of this process alone, under gloo, with a store in memory."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20))
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    with WarmPython() as process:
        yield process


@pytest.fixture(scope="module")
def said(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython
) -> dict[str, list[str]]:
    """Return, per script of SCRIPTS in the module, the error or the result of each rank; see rank_scripts.py."""
    folder = tmp_path_factory.mktemp("scripts")
    printed = warm_python.run("tests.distributed.rank_scripts", str(folder), *request.module.SCRIPTS)
    return dict(json.loads(printed.splitlines()[-1]))
