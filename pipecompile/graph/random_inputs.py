"""Random inputs of experiments: values of many kinds, so that no call takes all of them alike."""

from __future__ import annotations

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
    many true values; integers 0 and 1, or the `special` ones as well.
    """
    if dtype is torch.bool:
        return torch.rand(shape) < (0.5, 0.05, 0.95)[trial % 3]
    if dtype.is_floating_point or dtype.is_complex:
        return _random_numbers(shape, trial, special).to(dtype)
    choices = torch.tensor([0, 1, *(int(one) for one in (special if trial // 2 % 2 == 0 else ()))])
    return choices[torch.randint(len(choices), tuple(shape))].to(dtype)


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
