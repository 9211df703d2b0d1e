from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from pipecompile.distributed.data_parallel.left_groups import (
    _left,
    lost_ranks,
    note_lost,
    open_left_group,
    require_present,
)
from pipecompile.errors import InputError
from pipecompile.parameters import saving_group

pytestmark = pytest.mark.usefixtures("single_rank")


@pytest.fixture(autouse=True)
def nothing_lost() -> Iterator[None]:
    lost_ranks().clear()
    yield
    lost_ranks().clear()
    saving_group._LEFT.clear()


def test_a_group_of_ranks_is_made_once() -> None:
    group = open_left_group((0,), 5.0)
    assert open_left_group((0,), 5.0) is group
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    assert value.item() == 1.0


def test_a_mesh_with_ranks_that_are_lost_is_refused() -> None:
    require_present((0, 1))
    note_lost({1: "rank 1 was killed"})
    require_present((0, 2))
    with pytest.raises(InputError, match="the mesh has ranks that are lost: 1") as caught:
        require_present((0, 1))
    assert caught.value.where == "rank 1 was killed"


def test_a_default_group_that_was_destroyed_is_not_kept() -> None:
    """Its threads ran on after `destroy_process_group`, with those of our groups beside it."""
    before, world = dist.group.WORLD, dist.ProcessGroup(dist.HashStore(), 0, 1)
    kept, group = weakref.ref(world), open_left_group((0,), 5.0)
    try:
        dist.GroupMember.WORLD = world
        lost_ranks()[1] = "rank 1 was killed"
        saving_group.save_among(group)
        assert not _left().groups
    finally:
        dist.GroupMember.WORLD = before
    del world
    assert kept() is None
    assert lost_ranks() == {}


def test_the_ranks_that_are_left_save(monkeypatch: pytest.MonkeyPatch) -> None:
    assert saving_group.saving_group() is None
    group = open_left_group((0,), 5.0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    note_lost({1: "rank 1 was killed"})
    assert saving_group.saving_group() is group
    assert saving_group.saving_ranks(group) == [0]
