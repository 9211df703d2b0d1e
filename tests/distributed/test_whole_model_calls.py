from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pipecompile.distributed.whole_model_calls import parts_of_model
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
