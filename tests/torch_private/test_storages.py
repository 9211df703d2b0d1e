"""Memory and versions of tensors."""

from __future__ import annotations

import pytest
import torch

from pipecompile.torch_private.storages import (
    exchange,
    footprint,
    foreach_copy,
    foreach_mul,
    is_traceable_wrapper_subclass,
    memory_state,
    preserve_versions,
    storage_key,
    version_of,
)

pytestmark = pytest.mark.smoke


def test_views_share_a_key() -> None:
    x = torch.ones(4)
    assert storage_key(x) == storage_key(x[1:])
    assert storage_key(x) != storage_key(x.clone())


def test_writes_count_unless_versions_are_preserved() -> None:
    x = torch.ones(2)
    before = version_of(x)
    x.add_(1)
    assert version_of(x) == before + 1
    with preserve_versions((x,)):
        x.add_(1)
    assert version_of(x) == before + 1


def test_exchange_swaps_the_insides_and_keeps_the_objects() -> None:
    a, b = torch.ones(2), torch.zeros(3)
    exchange(a, b)
    assert (a.tolist(), b.tolist()) == ([0, 0, 0], [1, 1])


def test_foreach_functions_take_lists() -> None:
    a, b = foreach_mul([torch.ones(1), torch.ones(2)], [2.0, 3.0])
    assert (a.tolist(), b.tolist()) == ([2], [3, 3])
    foreach_copy([a], [torch.full((1,), 7.0)])
    assert a.item() == 7


def test_a_write_and_other_memory_change_the_state_of_a_tensor() -> None:
    states = [memory_state(tensor := torch.ones(2)), memory_state(tensor.add_(1))]
    kept, tensor.data = tensor.data, torch.ones(2)
    assert len({*states, memory_state(tensor)}) == 3
    assert kept.tolist() == [2.0, 2.0]
    assert memory_state(DENSE.to_sparse()) == (0, 0)


def test_plain_tensors_wrap_nothing() -> None:
    assert not is_traceable_wrapper_subclass(torch.ones(1))


DENSE = torch.tensor([[0.0, 1.0], [2.0, 0.0]])


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (DENSE, 16),
        (DENSE.to_sparse(), 2 * 4 + 2 * 2 * 8),
        (DENSE.to_sparse_csr(), 2 * 4 + 3 * 8 + 2 * 8),
        (DENSE.to_sparse_csc(), 2 * 4 + 3 * 8 + 2 * 8),
        (torch.ones(4, device="meta"), 16),
    ],
)
def test_bytes_of_what_is_stored(tensor: torch.Tensor, expected: int) -> None:
    assert footprint(tensor) == expected
