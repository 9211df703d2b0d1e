"""Operators as the dispatcher knows them."""

from __future__ import annotations

import pytest
import torch

from pipecompile.torch_private.operators import (
    HigherOrderOperator,
    name_of,
    schema_of,
    symbolic_function,
    torch_assert,
)

pytestmark = pytest.mark.smoke


def test_a_schema_says_what_is_written() -> None:
    assert schema_of(torch.ops.aten.add_.Tensor).is_mutable
    assert not schema_of(torch.ops.aten.add.Tensor).is_mutable


def test_higher_order_operators_have_a_name() -> None:
    operator = torch.ops.higher_order.cond
    assert isinstance(operator, HigherOrderOperator)
    assert name_of(operator) == "cond"


def test_functions_of_sizes() -> None:
    root = symbolic_function("sqrt")
    assert root is not None
    assert root(4) == 2
    assert symbolic_function("nonsense") is None


def test_torch_assert_raises() -> None:
    torch_assert(True, "fine")
    with pytest.raises(AssertionError, match="three"):
        torch_assert(False, "three")
