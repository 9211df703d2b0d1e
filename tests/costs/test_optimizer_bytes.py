"""The state of an optimizer: measured after a step, else known by class and options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipecompile.costs.optimizer_bytes import optimizer_state
from pipecompile.errors import InputError

MAKERS: list[tuple[Any, dict[str, Any], int]] = [
    (torch.optim.SGD, {"lr": 0.1}, 0),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 1),
    (torch.optim.RMSprop, {}, 1),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}, 3),
    (torch.optim.Adagrad, {}, 1),
    (torch.optim.Adam, {}, 2),
    (torch.optim.AdamW, {"amsgrad": True}, 3),
]


@pytest.mark.parametrize(("kind", "options", "expected"), MAKERS)
def test_an_optimizer_is_known_before_its_first_step_as_measured_after_it(
    kind: Any, options: dict[str, Any], expected: int
) -> None:
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), **options)
    assert optimizer_state(optimizer) == expected
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert optimizer_state(optimizer) == expected


@pytest.mark.parametrize(
    ("name", "expected"), [(None, 0), ("sgd", 0), ("momentum", 1), ("Adam_W", 2), (torch.optim.NAdam, 2)]
)
def test_an_optimizer_is_known_by_name_or_class(name: Any, expected: int) -> None:
    assert optimizer_state(name) == expected


def test_an_unknown_optimizer_is_refused_with_near_names() -> None:
    with pytest.raises(InputError, match=r"optimizer='adamm' is not known(?s:.*)try    optimizer='adam'"):
        optimizer_state("adamm")
