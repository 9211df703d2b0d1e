from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from pipecompile.distributed.data_parallel import left_groups
from pipecompile.distributed.data_parallel.pipeline_copies import PipelineCopies
from pipecompile.distributed.rank_mesh import RankMesh

pytestmark = pytest.mark.usefixtures("single_rank")


def test_copies_before_and_after_a_loss() -> None:
    alone = RankMesh.of(init_device_mesh("cpu", (1,), mesh_dim_names=("pp",)))
    ranks = replace(alone, copies=((0,), (1,)), left=(0, 1), members=(0, 1))
    assert PipelineCopies.of(ranks) == PipelineCopies((0, 1), (), 0, (0, 1), None)
    group = left_groups.open_left_group((0,), 5.0)
    after = PipelineCopies.of(ranks.of_copies((0,)))
    assert after == PipelineCopies((0,), (1,), 0, (0,), group)
    dist.barrier(group=after.group)
