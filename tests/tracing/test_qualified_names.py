"""Names of functions, and functions by name."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipecompile.errors import InputError
from pipecompile.tracing.qualified_names import Named, qualified, resolved


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (torch.cat, "torch.cat"),
        (F.relu, "torch.nn.functional.relu"),
        (F.gelu, "torch._C._nn.gelu"),
        (operator.getitem, "_operator.getitem"),
        (getattr, "builtins.getattr"),
        (torch.ops.aten.add.Tensor, "torch.ops.aten.add.Tensor"),
        (nn.Linear, "torch.nn.modules.linear.Linear"),
    ],
)
def test_known_functions_are_found_by_their_names(target: object, name: str) -> None:
    assert qualified(target) == name
    assert resolved(name) is target


def test_an_object_is_named_by_its_class() -> None:
    assert qualified(nn.Linear(1, 1)) == "torch.nn.modules.linear.Linear"


def test_the_class_of_a_bound_class_method_is_in_the_name() -> None:
    class Double(torch.autograd.Function):
        pass

    assert qualified(Double.apply).endswith("Double.apply")


@pytest.mark.parametrize(
    "name", ["os.system", "torch.no_such", "subprocess.run", "lonely", "mymodel.<locals>.<lambda>"]
)
def test_other_names_stay_names(name: str) -> None:
    found = resolved(name)
    assert found == Named(name)
    assert qualified(found) == name
    assert found.__name__.isidentifier()
    with pytest.raises(InputError, match="cannot be called"):
        found(1)
