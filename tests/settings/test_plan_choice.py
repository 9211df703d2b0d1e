from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.errors import InputError
from pipecompile.settings.plan_choice import check_plan

PLAN = pc.compile(
    nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2, example_args=(torch.ones(4, 4),), cost="analytic"
).plan


@pytest.mark.parametrize("checkpoint", ["never", "always", (True, False)])
def test_a_plan_without_constraints_is_accepted(checkpoint: Any) -> None:
    check_plan(PLAN, (), None, checkpoint)


def test_recomputation_left_open_is_that_of_a_plan_which_has_it() -> None:
    check_plan(replace(PLAN, recompute=(False, False)), (), None, "auto")
    with pytest.raises(InputError, match='checkpoint="auto" is given together with a plan'):
        check_plan(PLAN, (), None, "auto")


@pytest.mark.parametrize(("steering", "costs", "words"), [(("a",), None, "constraints"), ((), {"0": 1.0}, "costs")])
def test_what_a_plan_excludes_is_refused(steering: Any, costs: Any, words: str) -> None:
    with pytest.raises(InputError, match=f"plan is given together with {words}"):
        check_plan(PLAN, steering, costs, "never")
