from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipecompile.distributed.collectives import CollectiveGroup
from pipecompile.distributed.data_parallel.batchnorm_sync import (
    ReplicatedNorms,
    _merged,
    check_sync_groups,
    sync_batchnorm_layers,
    without_sync,
)
from pipecompile.errors import InputError
from pipecompile.runtime.cells.deferred_batchnorm import DeferredBatchNorm, DeferredNorm, DeferredNorms


def test_statistics_of_parts_of_unequal_sizes_are_merged() -> None:
    torch.manual_seed(0)
    samples = torch.randn(9, 3).double()
    rows = []
    for part in (samples[:2], samples[2:]):
        mean = part.mean(0)
        rows.append(torch.cat([torch.tensor([float(len(part))]), mean, (part - mean).square().sum(0)]))
    merged = _merged(torch.stack(rows), 9.0)
    assert merged.count == 9
    torch.testing.assert_close(merged.mean, samples.mean(0))
    torch.testing.assert_close(merged.spread, samples.var(0) * 8)


class Replayed(CollectiveGroup):
    """A group of two replicas: `rows` has what each has sent."""

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        self.rows.append(row)
        return torch.stack(self.rows)


def test_running_statistics_of_the_last_replica_are_those_of_the_whole_batch() -> None:
    """Two replicas settle one after the other; the second sees the statistics of both."""
    torch.manual_seed(0)
    samples, group = torch.randn(10, 3).double(), Replayed()
    whole, last = nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    for layer, part in ((copy.deepcopy(last), samples[:4]), (last, samples[4:])):
        norm = DeferredNorm(layer)
        norm.begin()
        DeferredBatchNorm(norm.new_call())(part)
        ReplicatedNorms(DeferredNorms((norm,)), group).settle()
    whole(samples)
    torch.testing.assert_close(last.running_mean, whole.running_mean)
    torch.testing.assert_close(last.running_var, whole.running_var)


def test_nothing_is_sent_if_no_layer_has_run() -> None:
    group = Replayed()
    ReplicatedNorms(DeferredNorms((DeferredNorm(nn.BatchNorm1d(3)),)), group).settle()
    assert not group.rows


class OtherCopy(CollectiveGroup):
    """A group of this replica and another, which has these names and this row."""

    def __init__(self, names: str, row: list[float]) -> None:
        self.names, self.row = names, row

    def all_gather_text(self, text: str) -> list[str]:
        return [text, self.names]

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        return torch.stack([row, torch.tensor(self.row, dtype=row.dtype)])


def test_buffers_that_came_home_on_another_replica_alone_are_taken() -> None:
    model = nn.Sequential(nn.BatchNorm1d(1), nn.BatchNorm1d(1))
    norms = DeferredNorms(tuple(map(DeferredNorm, cast(Any, model))))
    other = OtherCopy('["1.num_batches_tracked", "1.running_mean"]', [4.0, 0.5])
    ReplicatedNorms(norms, other, lambda: model).share(())
    assert [float(buffer) for buffer in model.buffers()] == [0.0, 1.0, 0.0, 0.5, 1.0, 4.0]
    other = OtherCopy('["1.running_mean"]', [9.0])
    ReplicatedNorms(norms, other, lambda: model).share([cast(Any, model)[1].running_mean, torch.ones(1)])
    assert [float(buffer) for buffer in model.buffers()] == [0.0, 1.0, 0.0, 0.5, 1.0, 4.0]
    ReplicatedNorms(norms, OtherCopy("not asked", [])).share(())


def test_layers_compute_alone_in_a_context_and_are_themselves_again() -> None:
    class OfUser(nn.SyncBatchNorm):
        pass

    layers = [nn.SyncBatchNorm(2), OfUser(2)]
    samples, expected = torch.randn(4, 2), nn.BatchNorm1d(2)

    def run() -> None:
        with without_sync(layers):
            assert torch.equal(layers[1](samples), expected(samples))  # torch's own forward refuses CPU tensors
            raise KeyError

    with pytest.raises(KeyError):
        run()
    assert [type(layer) for layer in layers] == [nn.SyncBatchNorm, OfUser]


def test_layers_of_one_process_do_not_exchange_statistics(single_rank: None) -> None:
    assert not sync_batchnorm_layers(nn.Sequential(nn.SyncBatchNorm(2), nn.BatchNorm1d(2)))


def test_the_group_of_a_layer_must_be_that_of_the_replicas(single_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: dict[object, list[int]] = {"copies": [0, 2], "all": [0, 1, 2, 3]}
    monkeypatch.setattr(dist, "get_process_group_ranks", groups.__getitem__)
    layer = nn.SyncBatchNorm(2, process_group="copies")
    check_sync_groups({"1": layer}, cast(Any, "copies"))
    layer.process_group = cast(Any, "all")
    with pytest.raises(
        InputError, match=r"is of ranks \[0, 1, 2, 3\]\n  where  1\n  why    ranks \[0, 2\] run its stage"
    ):
        check_sync_groups({"1": layer}, cast(Any, "copies"))
    with pytest.raises(InputError, match=r"ranks \[0\] run its stage"):
        check_sync_groups({"1": layer}, None)
