"""Where a pipeline may lose copies, and where it is refused."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import pipecompile as pc
from pipecompile.distributed.data_parallel.continuing_pipeline import ContinuingPipeline
from pipecompile.distributed.data_parallel.lost_copies import check_lost_copies
from pipecompile.distributed.rank_mesh import RankMesh
from pipecompile.errors import InputError, LostCopyWarning


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
def test_a_copy_that_may_be_lost_holds_no_gradients() -> None:
    with pytest.raises(InputError, match="the gradients that a copy holds would be lost with it"):
        ContinuingPipeline.no_sync(cast(Any, None))


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
