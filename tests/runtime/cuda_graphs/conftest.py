"""Captures on an emulated device."""

import pytest

from pipecompile.runtime.cuda_graphs import capture
from tests.support.emulated_capture import EmulatedCaptures


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> EmulatedCaptures:
    """Every device has graphs from now on; what they do is counted."""
    made = EmulatedCaptures()
    monkeypatch.setattr(capture, "graph_captures", lambda _device: made)
    return made
