from __future__ import annotations

from typing import Any

import pytest
import torch

from pipecompile.batching.empty_batch import has_no_samples, require_no_target
from pipecompile.errors import InputError


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


@pytest.mark.parametrize(
    ("target", "batch_dims"),
    [
        (None, {}),
        (torch.zeros(0, 3), {}),
        (torch.zeros(1), {}),  # shared
        ({"labels": torch.zeros(0), "weight": torch.tensor(2.0)}, {}),
        (torch.zeros(0, 3), {"x": 0}),
        (torch.zeros(4, 3), {"target": None}),
        (torch.zeros(4, 0), {"target": 1}),
        ([], {"target": list}),
    ],
)
def test_the_target_of_a_batch_of_no_samples_has_none(target: Any, batch_dims: dict[str, Any]) -> None:
    require_no_target(target, batch_dims)


@pytest.mark.parametrize(
    ("target", "batch_dims", "words"),
    [
        (torch.zeros(8, 3), {}, "batch sizes of the target and the inputs disagree.*target: 8, inputs: 0"),
        ({"a": torch.zeros(0), "b": torch.zeros(8)}, {}, "disagree.*target_b: 8|disagree.*b: 8"),
        (torch.zeros(0, 8), {"target": 1}, "disagree"),
        ([1, 2], {"target": list}, "has 2 entries for 0 samples"),
    ],
)
def test_a_target_beside_no_samples_is_refused(target: Any, batch_dims: dict[str, Any], words: str) -> None:
    """It was left out, silently."""
    with pytest.raises(InputError, match=f"(?s){words}"):
        require_no_target(target, batch_dims)
