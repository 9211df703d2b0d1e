"""A forward that leaves settings of the process changed: no call of a pipeline leaves them so, and a warning says it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.tracing.state.process_settings import ProcessSettings

WRITES: dict[str, Callable[[], Any]] = {
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "choice of kernels": lambda: torch.use_deterministic_algorithms(True),
}


class Setting(nn.Sequential):
    def __init__(self, write: Callable[[], Any]) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
        self.write = write

    def forward(self, x: torch.Tensor) -> Any:
        self.write()
        return super().forward(x)


@pytest.mark.parametrize("name", WRITES)
def test_no_call_leaves_a_setting_of_the_process_changed(name: str) -> None:
    settings = ProcessSettings()
    with pytest.warns(pc.RecordingWarning, match=f"Setting.forward changes torch's {name}"):
        pipe = pc.compile(Setting(WRITES[name]), 2, example_args=(torch.ones(4, 4),), n_microbatches=2, cost="profile",
                          loss_fn=lambda y: y.square().mean())  # fmt: skip
    for _ in range(2):
        pipe.step(torch.randn(4, 4))
        assert settings.restore() == []
