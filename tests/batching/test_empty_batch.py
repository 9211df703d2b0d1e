from __future__ import annotations

from typing import Any

import pytest
import torch

from pipecompile.batching.empty_batch import has_no_samples


def forward(x: Any, mask: Any = None) -> None:
    del x, mask


@pytest.mark.parametrize(
    ("args", "batch_dims", "is_empty"),
    [
        ((torch.zeros(0, 3),), {}, True),
        ((torch.zeros(2, 3),), {}, False),
        ((torch.zeros(2, 0),), {}, False),  # samples without features
        ((torch.zeros(0, 3), torch.zeros(1, 3)), {}, True),  # the second is shared
        ((torch.zeros(0, 3), torch.zeros(4, 3)), {}, False),  # they disagree, which `flatten` says
        ((torch.zeros(0, 3), torch.zeros(4, 3)), {"mask": None}, True),
        ((torch.zeros(3, 0),), {"x": 1}, True),
        (([torch.zeros(0), {"a": torch.zeros(0, 2)}],), {}, True),
        ((3,), {}, False),
    ],
)
def test_a_batch_of_no_samples_is_seen(args: tuple[Any, ...], batch_dims: dict[str, Any], is_empty: bool) -> None:
    assert has_no_samples(forward, args, {}, batch_dims) is is_empty
