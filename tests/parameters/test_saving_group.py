from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from pipecompile.errors import InputError
from pipecompile.parameters.saving_group import Savers, checked_group, save_among, saving_group, saving_ranks


def test_a_group_serves_for_its_default_group_alone() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20))
    assert (saving_group(), saving_ranks(saving_group())) == (None, [0])
    group = dist.new_group([0])
    save_among(group)
    assert (saving_group(), saving_ranks(saving_group())) == (group, [0])
    savers = Savers.present(group)
    assert savers is not None
    assert (savers.ranks, savers.number, savers.are_gone) == ((0,), 0, False)
    dist.destroy_process_group()
    assert savers.are_gone
    assert saving_group() is None
    assert Savers.present(None) is None


def test_a_group_that_is_given_is_one_of_this_rank() -> None:
    assert checked_group(None) is None
    with pytest.raises(InputError, match="process_group=3 is not a process group"):
        checked_group(3)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        assert checked_group(dist.group.WORLD) is dist.group.WORLD
        with pytest.raises(InputError, match="process_group= is a group of other ranks"):
            checked_group(dist.GroupMember.NON_GROUP_MEMBER)
    finally:
        dist.destroy_process_group()
