"""One parameter of which this rank, of two, keeps a half; its shard is a plain tensor."""

from __future__ import annotations

import torch
from torch import nn

from pipecompile.distributed.data_parallel.sharded_parameter import ShardedParameter, padded, rows_of
from pipecompile.torch_private.storages import foreach_copy


def test_rows_are_cut_as_torch_chunks_them() -> None:
    whole = torch.arange(10.0).view(5, 2)
    assert [len(rows_of(whole, index, 4)) for index in range(4)] == [2, 2, 1, 0]
    assert torch.equal(torch.cat([rows_of(whole, index, 4) for index in range(4)]), whole)
    assert rows_of(torch.tensor(3.0), 1, 2).item() == 3.0


def test_padding_is_at_the_end() -> None:
    assert padded(torch.ones(1, 2), 4).tolist() == [1.0, 1.0, 0.0, 0.0]


def half(shape: tuple[int, ...], index: int = 0) -> ShardedParameter:
    """The part of rank `index` of two."""
    whole = nn.Parameter(torch.arange(float(torch.Size(shape).numel())).view(shape))
    rows = rows_of(whole.data, index, 2).clone()
    width = -(-shape[0] // 2) * torch.Size(shape[1:]).numel() if shape else 1
    return ShardedParameter(whole, nn.Parameter(rows), shape, whole.stride(), width)


def gather(parameter: ShardedParameter, rows: torch.Tensor) -> None:
    foreach_copy(*zip(*parameter.copies(rows), strict=True))
    parameter.take()


def test_a_freed_parameter_is_nan_and_keeps_its_shape() -> None:
    parameter = half((3, 2))
    parameter.free(0, 2)
    assert parameter.whole.shape == (3, 2)
    assert parameter.whole.isnan().all()
    assert parameter.whole.untyped_storage().nbytes() == 4


def test_a_gathered_parameter_has_the_values_of_both_ranks_and_its_strides() -> None:
    for stride in ((1, 3), (2, 1)):
        parameter = half((3, 2))
        parameter.stride = stride
        parameter.free(0, 2)
        gather(parameter, torch.tensor([[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 0.0, 0.0]]))  # two numbers of padding
        assert parameter.whole.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
        assert parameter.whole.stride() == stride


def test_views_see_the_values_of_the_next_gather_and_those_of_now_when_the_step_is_over() -> None:
    for stride in ((1, 3), (2, 1)):
        parameter = half((3, 2))
        parameter.stride = stride
        gather(parameter, torch.arange(8.0).view(2, 4))
        view = parameter.whole.detach().t()
        parameter.free(0, 2, is_kept=True)
        assert view.untyped_storage().nbytes() == 0
        assert parameter.whole.isnan().all()
        gather(parameter, torch.arange(8.0).view(2, 4) + 10)
        assert view.tolist() == [[10.0, 12.0, 14.0], [11.0, 13.0, 15.0]]
        parameter.free(0, 2)
        assert view.sum() == 75.0
        assert parameter.memory is None


def test_rows_that_a_forward_writes_are_kept() -> None:
    parameter = half((3, 2), index=1)
    gather(parameter, torch.arange(8.0).view(2, 4))
    with torch.no_grad():
        parameter.whole += 10
    parameter.free(1, 2, is_kept=True)
    assert parameter.local.tolist() == [[14.0, 15.0]]


def test_the_rows_of_a_gradient_are_those_of_the_ranks() -> None:
    parameter = half((3, 2))
    assert parameter.gradient is None
    assert parameter.rows(None, 2).tolist() == [[0.0] * 4] * 2
    parameter.whole.grad = torch.arange(6.0).view(3, 2)
    assert parameter.rows(parameter.gradient, 2).tolist() == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 0.0, 0.0]]
    assert half(()).rows(torch.tensor(2.0), 2).tolist() == [[2.0], [2.0]]


def test_only_shards_without_padding_lie_one_behind_the_other() -> None:
    assert half((4, 2)).is_even(2)
    assert not half((3, 2)).is_even(2)
    assert not half(()).is_even(1)


def test_gradients_of_a_shard_are_added_up() -> None:
    parameter = half((3, 2), index=1)
    for _ in range(2):
        parameter.add_gradient(torch.tensor([1.0, 2.0, 0.0, 0.0]))
    assert parameter.shard.grad is not None
    assert parameter.shard.grad.tolist() == [[2.0, 4.0]]
