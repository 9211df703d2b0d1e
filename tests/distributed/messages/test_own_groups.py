"""Groups beside those of the mesh: opened by all ranks, closed at a failure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from pipecompile.distributed.messages import own_groups
from pipecompile.distributed.messages.own_groups import GroupUse, own_group, require_unspent
from pipecompile.distributed.rank_mesh import RankMesh
from pipecompile.errors import InputError
from pipecompile.torch_private.process_groups import timeout_of

SCRIPTS = ["after a failure", "beside a failure"]


@pytest.fixture
def ranks(single_rank: None) -> Iterator[RankMesh]:
    found = RankMesh.of(None)
    yield found
    own_groups._SPENT.clear()
    GroupUse(found).drop()
    own_groups._SPENT.clear()


def test_pipelines_share_groups_until_they_are_dropped(ranks: RankMesh) -> None:
    use, other = GroupUse(ranks), GroupUse(ranks)
    assert not use.is_open
    backend, first = use.opened(HashStore(), is_new=True)
    assert use.is_open
    assert other.opened(HashStore(), is_new=False) == (backend, first + 1)
    ours = own_group(ranks.group)
    assert ours is not ranks.group
    dist.all_reduce(value := torch.ones(2), group=ours)
    assert value.tolist() == [1.0, 1.0]
    use.drop()
    assert not use.is_open
    assert use.is_stale
    assert other.is_stale
    assert own_group(ranks.group) is ranks.group
    assert use.opened(HashStore(), is_new=True)[0] is not backend
    assert not use.is_stale


def test_groups_in_which_layers_send_are_spent_by_a_failure(ranks: RankMesh) -> None:
    use = GroupUse(ranks)
    use.note_layers([ranks.group])
    use.drop()
    with pytest.raises(InputError, match="has failed, and this one would use its process groups"):
        GroupUse(ranks)
    require_unspent([None, dist.new_group([0])], [0])


def test_groups_in_which_layers_send_wait_as_long_as_a_pipeline(ranks: RankMesh) -> None:
    """The groups of a mesh wait for half an hour: a step with `tp` waited so long for a rank that was stopped."""
    group = dist.new_group([0], timeout=timedelta(minutes=30))
    GroupUse(ranks).note_layers([group])
    assert timeout_of(group).total_seconds() == ranks.timeout == 20.0


def test_beside_a_group_with_nccl_there_is_one_for_the_cpu_and_a_failure_spends_it(
    ranks: RankMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agreements went over the GPU before, and the host waited for its stream."""
    monkeypatch.setattr(own_groups, "has_gloo_alone", lambda group: False)
    aborted = list[object]()
    monkeypatch.setattr(own_groups, "abort_nccl", aborted.append)
    use = GroupUse(ranks)
    assert use.opened(HashStore(), is_new=True) is not None
    assert own_group(ranks.group, "cuda") is ranks.group
    ours = own_group(ranks.group)
    assert ours is not ranks.group
    dist.all_reduce(value := torch.ones(2), group=ours)
    assert value.tolist() == [1.0, 1.0]
    use.launched(ranks.group, lambda: None)
    use.settle()
    use.drop()
    assert not aborted  # nothing was under way
    with pytest.raises(InputError, match="init_device_mesh"):
        GroupUse(ranks)


def test_a_failure_ends_a_collective_of_nccl_that_is_under_way(
    ranks: RankMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel waited for ever for the ranks that had left the step, and so did whoever waited for the GPU."""
    aborted = list[object]()
    monkeypatch.setattr(own_groups, "abort_nccl", aborted.append)
    use = GroupUse(ranks)
    use.launched(ranks.group, lambda: None)
    use.drop()
    assert aborted == [ranks.group]


def test_a_mesh_names_each_of_its_groups_once(ranks: RankMesh) -> None:
    assert ranks.groups == (ranks.group,)
    given: Any = SimpleNamespace(
        group=1, replica_group=2, shard_mesh=SimpleNamespace(get_all_groups=lambda: [3, 2]), tensor_group=4
    )
    assert RankMesh.groups.fget(given) == (1, 2, 3, 4)  # type: ignore[attr-defined]


@pytest.mark.timeout(700)
def test_a_pipeline_is_compiled_again_on_the_mesh_of_one_that_failed(said: dict[str, list[str]]) -> None:
    """It waited for the timeout, or the processes ended inside gloo, before; and so did messages of the user's in the mesh's groups."""
    for rank, text in enumerate(said["after a failure"]):
        error = "RunError: stage 1 failed" if rank == 3 else "RunError: rank 3 failed at 1F0: stage 1 failed"
        assert text.startswith(
            f"result: [1.096329, '{error} in forward of micro-batch 0: ValueError: the data are wrong'"
        )
        assert "1.096329, 1.096329, 'RunError: this pipeline failed before']" in text


@pytest.mark.timeout(700)
def test_a_pipeline_goes_on_beside_one_that_has_failed(said: dict[str, list[str]]) -> None:
    """Its connections were closed with those of the other one, before; and the error kept the batch: on the rank that failed in a circle
    with a frame, on the other in the pipeline.
    """
    for text in said["beside a failure"]:
        assert text.startswith("result: [0.72827, 'RunError: ")
        assert text.splitlines()[0].endswith("', 0, 0.72827, 0.72827, 4]")
