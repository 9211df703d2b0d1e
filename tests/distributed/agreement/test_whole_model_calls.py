from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pipecompile.distributed.agreement.whole_model_calls import parts_of_model
from pipecompile.errors import InputError

WEIGHT = nn.Parameter(torch.ones(2))


def clip(parameters: Iterator[nn.Parameter]) -> Any:
    return nn.utils.clip_grad_norm_(parameters, 1.0)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (clip, "pipe.clip_grad_norm_(max_norm), by the norm of the whole model"),
        (torch.optim.LBFGS, "its step depends on all parameters together, and each of 2 ranks has those of its own"),
    ],
)
def test_functions_that_need_all_parameters_are_refused(
    call: Callable[[Iterator[nn.Parameter]], Any], said: str
) -> None:
    with pytest.raises(InputError) as caught:
        call(parts_of_model(iter([WEIGHT]), 2))
    assert said in str(caught.value)
    call(parts_of_model(iter([WEIGHT]), 1))


@pytest.mark.parametrize("call", [list, torch.optim.AdamW, torch.optim.SGD])
def test_what_takes_each_parameter_alone_is_not(call: Callable[[Iterator[nn.Parameter]], Any]) -> None:
    call(parts_of_model(iter([WEIGHT]), 2))


@pytest.mark.parametrize("call", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_an_optimizer_of_a_rank_without_parameters_does_nothing(call: Callable[..., torch.optim.Optimizer]) -> None:
    """Torch refused an empty list, on the rank of an activation alone: the model as a whole has parameters."""
    optimizer = call(parts_of_model(iter([]), 2), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    assert [group["params"] for group in optimizer.param_groups] == [[]]
    assert list(parts_of_model(iter([]), 2)) == []
    with pytest.raises(ValueError, match="empty parameter list"):
        call(parts_of_model(iter([]), 1), lr=0.1)
