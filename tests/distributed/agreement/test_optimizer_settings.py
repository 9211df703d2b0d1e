from __future__ import annotations

import torch
from torch import nn

from pipecompile.distributed.agreement.optimizer_settings import OptimizerSettings


def group(rate: float) -> dict[str, object]:
    return {"params": [nn.Parameter(torch.ones(2))], "lr": rate}


def test_rates_of_single_groups_are_compared_by_how_they_have_moved() -> None:
    optimizer = torch.optim.SGD([group(0.1), group(0.3)], lr=1.0, momentum=0.5, foreach=False)
    settings = OptimizerSettings(optimizer)
    (first,) = settings.of_step(optimizer)
    assert first.startswith("SGD(lr=1.0, momentum=0.5, dampening=0, weight_decay=0, nesterov=False")
    assert "foreach" not in first
    assert first.endswith(", lr x 1")
    optimizer.param_groups[0]["lr"] = 0.05
    assert sorted(text.rpartition(" ")[2] for text in settings.of_step(optimizer)) == ["0.5", "1"]


def test_a_rate_that_begins_with_0_has_moved_by_nothing_until_it_has_a_value() -> None:
    optimizer = torch.optim.Adam([group(0.0)], lr=torch.tensor(1.0))
    settings = OptimizerSettings(optimizer)
    assert [text.rpartition(", ")[2] for text in settings.of_step(optimizer)] == ["lr x 0"]
    optimizer.param_groups[0]["lr"] = torch.tensor(0.2)
    assert [text.rpartition(", ")[2] for text in settings.of_step(optimizer)] == ["lr x 1"]
    optimizer.param_groups[0]["initial_lr"] = 0.4
    assert [text.rpartition(", ")[2] for text in settings.of_step(optimizer)] == ["lr x 0.5"]
