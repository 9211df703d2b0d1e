"""The generator functions in which torch.utils.checkpoint begins a region."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from pipecompile.torch_private.checkpoint_points import REGION_GENERATORS, early_stop_override


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
