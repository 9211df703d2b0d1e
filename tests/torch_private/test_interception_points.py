"""Functions that a recording replaces exist where torch calls them."""

from __future__ import annotations

import pytest
import torch

from pipecompile.torch_private.interception_points import (
    CAUSAL_MASK,
    NESTED_MASK,
    SCRIPT_CALL,
    VALIDATE_ARGUMENTS,
    scripted_source,
)

pytestmark = pytest.mark.smoke


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@pytest.mark.parametrize("point", [CAUSAL_MASK, NESTED_MASK, SCRIPT_CALL, VALIDATE_ARGUMENTS])
def test_the_owner_has_the_name(point: tuple[object, str]) -> None:
    assert hasattr(*point)


def test_the_causal_mask_is_recognised() -> None:
    owner, name = CAUSAL_MASK
    mask = torch.triu(torch.full((3, 3), float("-inf")), 1)
    assert getattr(owner, name)(mask, None, 3)
    assert not getattr(owner, name)(torch.zeros(3, 3), None, 3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_function_has_a_source() -> None:
    assert scripted_source(torch.jit.script(double)) is double
