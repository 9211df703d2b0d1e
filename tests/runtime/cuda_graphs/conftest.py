"""Captures on an emulated device."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pipecompile.runtime.cuda_graphs import capture
from tests.support.emulated_capture import EmulatedCaptures


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> EmulatedCaptures:
    """Every device has graphs from now on; what they do is counted."""
    made = EmulatedCaptures()
    monkeypatch.setattr(capture, "graph_captures", lambda _device: made)
    return made


@pytest.fixture
def matmul() -> Iterator[Any]:
    """The settings of products on GPUs, whose precision a test may set."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    yield settings
    settings.fp32_precision = before
