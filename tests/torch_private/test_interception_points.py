"""Functions that a recording replaces exist where torch calls them."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from pipecompile.torch_private.interception_points import (
    CAUSAL_MASK,
    NESTED_MASK,
    REGION_GENERATORS,
    SCRIPT_CALL,
    VALIDATE_ARGUMENTS,
    early_stop_override,
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


@pytest.mark.smoke
def test_a_checkpoint_calls_one_of_the_generators(monkeypatch):
    begun = []
    for module, name in REGION_GENERATORS[:2]:
        if original := getattr(sys.modules[module], name, None):

            def counted(*args, original=original, **kwargs):
                begun.append(args[0])
                return original(*args, **kwargs)

            monkeypatch.setattr(sys.modules[module], name, counted)
    checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert begun == [torch.sin]


@pytest.mark.smoke
def test_the_switch_for_stopping_early():
    assert early_stop_override() is None
    with set_checkpoint_early_stop(False):
        assert early_stop_override() is False
