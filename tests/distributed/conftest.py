from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import HashStore


@pytest.fixture(scope="module")
def single_rank() -> Iterator[None]:
    """A process group of this process alone, under gloo, with a store in memory."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20))
    yield
    dist.destroy_process_group()
