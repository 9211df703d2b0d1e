"""The kind of a target, and its values by name."""

from __future__ import annotations

import torch

from pipecompile.driver.target_values import target_kind, target_values
from pipecompile.ir import TARGET


def test_the_kind_has_dtypes_numbers_of_dimensions_and_plain_values() -> None:
    y = torch.zeros(3, 2)
    assert target_kind(None) is None
    assert target_kind(y) == target_kind(y[:1]) == (torch.float32, 2)
    assert target_kind({"y": y, "n": 1}) == target_kind({"y": y[:1], "n": 1})
    assert target_kind({"y": y, "n": 1}) != target_kind({"y": y, "n": 2})


def test_leaves_have_names() -> None:
    y = torch.zeros(3)
    assert target_values(None) == {TARGET: None}
    assert target_values(y) == {TARGET: y, f"{TARGET}:0": y}
    assert target_values((y, 2))[f"{TARGET}:1"] == 2
