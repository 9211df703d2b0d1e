from __future__ import annotations

import pytest
import torch

from pipecompile.torch_private.profiling import is_profiling

pytestmark = pytest.mark.smoke


def test_a_profiler_is_noticed_while_it_is_on() -> None:
    assert not is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert is_profiling()
    assert not is_profiling()
