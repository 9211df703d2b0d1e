"""The report counts nodes, modules and parameters, and lists what is kept whole."""

from __future__ import annotations

import torch
from torch import nn

from pipecompile.tracing import trace
from pipecompile.tracing.recording_report import summarize_recording
from tests.support.checkpointed import Net


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() if x.sum() > 0 else -x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.branch, self.rnn = Branch(), nn.LSTM(4, 4, batch_first=True)
        self.first.register_full_backward_hook(lambda module, given, made: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.rnn(self.branch(self.last(self.first(x))))[0]
        return x * 2 if x.shape[0] > 1 else x


def test_counts_and_parts_kept_whole() -> None:
    report = summarize_recording(trace(Model(), torch.randn(3, 5, 4)))
    assert report.layers == {"Linear": 2, "LSTM": 1}
    assert report.parameters == sum(parameter.numel() for parameter in Model().parameters())
    assert {(whole.name, whole.kind, whole.code) for whole in report.kept_whole} == {
        ("branch", "opaque", "PC101"),
        ("first", "hooked", ""),
        ("rnn", "layer", ""),
    }
    (branch,) = (whole for whole in report.kept_whole if whole.kind == "opaque")
    assert branch.source == "return x.relu() if x.sum() > 0 else -x"
    assert f"{__file__}:{branch.line} in Branch.forward" in str(branch)
    (guard,) = report.guards
    assert guard.startswith("batch_size > 1 (test_recording_report.py:")
    assert report.batch_size is None
    assert report.summary == f"{report.nodes} nodes of {report.modules} modules, {report.parameters} parameters"


def test_regions_are_counted() -> None:
    report = summarize_recording(trace(Net(True), torch.randn(3, 4)))
    assert report.regions == 4
    assert report.summary.endswith(" parameters, 4 checkpointed regions")
