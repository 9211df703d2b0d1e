from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from pipecompile.distributed.data_parallel import left_groups, pipeline_copies
from pipecompile.distributed.data_parallel.pipeline_copies import PipelineCopies
from pipecompile.distributed.failures.unopened_groups import GroupNotOpened
from pipecompile.distributed.rank_mesh import RankMesh
from pipecompile.errors import InputError

pytestmark = pytest.mark.usefixtures("single_rank")


def test_copies_before_and_after_a_loss() -> None:
    alone = RankMesh.of(init_device_mesh("cpu", (1,), mesh_dim_names=("pp",)))
    ranks = replace(alone, copies=((0,), (1,)), left=(0, 1), members=(0, 1))
    whole = PipelineCopies.of(ranks)
    assert (whole.left, whole.lost, whole.number, whole.ranks) == ((0, 1), (), 0, (0, 1))
    assert PipelineCopies.of(alone).group is None  # the default group has no other ranks
    with patch.object(dist, "get_world_size", return_value=2):
        after = PipelineCopies.of(ranks.of_copies((0,)))
        assert (after.left, after.lost, after.number, after.ranks) == ((0,), (1,), 0, (0,))
        group = after.group
        assert group is left_groups.open_left_group((0,), 5.0)
    dist.barrier(group=group)


def test_a_group_that_not_all_ranks_ask_for_is_an_error() -> None:
    copies = PipelineCopies((0,), (), 0, (0, 1), 1.0)
    with (
        patch.object(pipeline_copies, "open_left_group", side_effect=GroupNotOpened((0, 1), RuntimeError("timeout"))),
        pytest.raises(InputError, match="there is no process group of the ranks of the pipeline"),
    ):
        _ = copies.group
