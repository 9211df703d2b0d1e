"""Random inputs of experiments: values of many kinds, so that no call takes all of them alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from pipecompile.torch_private import pytree
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["random_values", "special_numbers"]

_IGNORED = -100
"""The class index that losses of torch ignore by default."""

_FAR = 1e6
"""Largest number of a call's arguments that is taken as a value of its inputs."""


def random_values(shape: Sequence[int], dtype: torch.dtype, trial: int, special: Sequence[float]) -> torch.Tensor:
    """Return random values. Trials differ in kind: fractions, normal or sparse numbers, numbers near the `special` ones; few or
    many true values; integers 0 and 1, or the `special` ones as well. True values and special integers become more frequent along
    a value, so that the parts of a batch hardly ever have the same share of them.
    """
    with torch.device("cpu"):  # not the default device of a script
        return _random_values(shape, dtype, trial, special)


def _random_values(shape: Sequence[int], dtype: torch.dtype, trial: int, special: Sequence[float]) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(shape) < (_rising(shape), 0.05, 0.95)[trial % 3]
    if dtype.is_floating_point or dtype.is_complex:
        return _random_numbers(shape, trial, special).to(dtype)
    plain = torch.randint(2, tuple(shape))
    if trial // 2 % 2 or not special:
        return plain.to(dtype)
    choices = torch.tensor([int(one) for one in special])
    chosen = choices[torch.randint(len(choices), tuple(shape))]
    return torch.where(torch.rand(shape) < _rising(shape), chosen, plain).to(dtype)


def _rising(shape: Sequence[int]) -> torch.Tensor:
    """Return probabilities from 0.1 to 0.9 along a value."""
    return torch.linspace(0.1, 0.9, math.prod(shape)).reshape(tuple(shape))


def _random_numbers(shape: Sequence[int], trial: int, special: Sequence[float]) -> torch.Tensor:
    match trial % 4:
        case 0:
            return torch.randn(shape)
        case 1:
            return torch.rand(shape) * 0.8 + 0.1
        case 2:
            centres = torch.tensor([0.0, *special])
            return centres[torch.randint(len(centres), tuple(shape))] + torch.randn(shape)
        case _:
            return torch.randn(shape) * (torch.rand(shape) < 0.1)  # mostly zeros


def special_numbers(nodes: Sequence[fx.Node], graph: TracedGraph) -> list[float]:
    """Return numbers that may have a meaning among the inputs: those that the calls mention, and torch's ignored class."""
    found: list[float] = [_IGNORED]
    for node in nodes:
        leaves = pytree.tree_leaves((node.args, node.kwargs))
        if node.op == "call_module":
            leaves.append(getattr(graph.get_submodule(str(node.target)), "ignore_index", None))
        found += [leaf for leaf in leaves if type(leaf) in (int, float) and abs(leaf) < _FAR]
    return list(dict.fromkeys(found))
