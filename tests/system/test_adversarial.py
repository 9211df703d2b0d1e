"""The adversarial zoo's own judgement: a model with random draws passes, and one that differs from its twin is found."""

from __future__ import annotations

from typing import Any

import adversarial_check
import pytest
import torch
from adversarial_changes import CHANGES, chosen
from adversarial_check import examine
from adversarial_table import verdict
from torch import nn
from zoo_models.specimen import Call, Specimen

import pipecompile as pc


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.noise = 0.3
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x + self.noise * torch.randn_like(x)))


class Moody(Noisy):
    """Another model for every object, as no model should be: it differs from its twin."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        Moody.made += 1
        self.mood = Moody.made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.mood


def inputs(samples: int) -> Call:
    return Call((torch.randn(samples, 4),))


def row_of(kind: type[nn.Module]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    examine(Specimen("here", "group", kind.__name__, kind, inputs), row.update)
    return row


def test_a_model_with_draws_that_changes_passes() -> None:
    row = row_of(Noisy)
    assert verdict(row) in ("right", "anew"), row
    assert len(row["changes"]) == 2
    assert row["eager again"] == "right"
    assert row["phase"] == "done"


def test_a_model_that_differs_from_its_twin_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adversarial_check._Story, "_repeated", adversarial_check._Story._fresh)
    row = row_of(Moody)
    assert verdict(row) == "WRONG", row
    assert "loss by" in row["step 1: why"]


def test_a_model_that_does_not_repeat_its_numbers_is_left_out() -> None:
    assert "no seed sets" in row_of(Moody)["skipped"]


def test_a_refusal_is_told_with_its_reason() -> None:
    class Refused(Noisy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() > 0 else super().forward(-x)

    row = row_of(Refused)
    assert verdict(row) == "refused", row
    assert "PC101" in row["compile: why"]
    assert issubclass(pc.TraceError, pc.PipecompileError)


def test_changes_of_a_model_do_not_depend_on_chance() -> None:
    assert chosen("a") == chosen("a") != chosen("b")
    assert sorted(chosen("a")) == sorted(CHANGES)
    model = Noisy()
    assert CHANGES["dropout rate"](model)
    assert not CHANGES["fewer layers"](model)
