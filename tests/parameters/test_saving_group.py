from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import HashStore

from pipecompile.parameters.saving_group import Savers, save_among, saving_group, saving_ranks


def test_a_group_serves_for_its_default_group_alone() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20))
    assert (saving_group(), saving_ranks()) == (None, [0])
    group = dist.new_group([0])
    save_among(group)
    assert (saving_group(), saving_ranks()) == (group, [0])
    savers = Savers.present(group)
    assert savers is not None
    assert (savers.ranks, savers.number, savers.are_gone) == ((0,), 0, False)
    dist.destroy_process_group()
    assert savers.are_gone
    assert saving_group() is None
    assert Savers.present(None) is None
