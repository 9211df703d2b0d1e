"""Taking a mini-batch apart and putting outputs together are each other's inverse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.errors import InputError
from pipecompile.runtime.microbatch import gather, scatter, scatter_tree, sizes


@given(st.integers(1, 60), st.integers(1, 12))
def test_sizes_are_those_of_tensor_split(samples: int, count: int) -> None:
    count = min(samples, count)
    assert sizes(samples, count) == tuple(len(part) for part in torch.arange(samples).tensor_split(count))


@given(st.integers(1, 20), st.integers(1, 5))
def test_gather_undoes_scatter(samples: int, count: int) -> None:
    x = torch.arange(samples * 3.0).reshape(samples, 3)
    parts = scatter(x, 0, min(count, samples))
    assert torch.equal(gather(parts, 0, [1.0] * len(parts)), x)


def test_what_is_not_batched_is_shared() -> None:
    assert scatter(None, None, 3) == (None, None, None)
    assert scatter(torch.tensor(2.0), None, 2) == (torch.tensor(2.0), torch.tensor(2.0))


def test_scalars_are_averaged_by_size_and_the_rest_is_taken_once() -> None:
    losses = [torch.tensor(1.0), torch.tensor(4.0)]
    assert gather(losses, None, [0.75, 0.25]) == 1.75
    table = torch.arange(4).reshape(1, 4)
    assert torch.equal(gather([table, table], None, [0.5, 0.5]), table)


def test_nested_targets() -> None:
    target = {"a": torch.arange(5), "b": [torch.arange(10).reshape(5, 2), "word"]}
    first, second = scatter_tree(target, 2, 5, {})
    assert first["a"].tolist() == [0, 1, 2]
    assert second["b"][0].tolist() == [[6, 7], [8, 9]]
    assert second["b"][1] == "word"
    with pytest.raises(InputError, match="target_a: 4, inputs: 5"):
        scatter_tree({"a": torch.arange(4)}, 2, 5, {})
