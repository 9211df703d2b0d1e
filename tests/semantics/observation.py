"""Observations of a model that is called: outputs, gradients, buffers, modes, and the state that it keeps on itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.semantics.case import Case

__all__ = ["Observations", "called", "difference", "looped"]

Call = Callable[..., Any]

ASPECTS = ("outputs", "gradients", "buffers", "state")


@dataclass
class Observations:
    """One entry a call and aspect. The next random number is part of the state."""

    outputs: list[Any] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)
    buffers: list[Any] = field(default_factory=list)
    state: list[Any] = field(default_factory=list)
    modes: list[bool] = field(default_factory=list)


def looped(call: Call, count: int) -> Call:
    """Return a call that loops over `count` micro-batches and concatenates their outputs."""

    def loop(*args: Any) -> Any:
        parts = [torch.tensor_split(a, count) if _batched(a) else (a,) * count for a in args]
        made = [call(*each) for each in zip(*parts, strict=True)]
        flat = [pytree.tree_leaves(one) for one in made]
        joined = [torch.cat(leaf) if _batched(leaf[0]) else leaf[0] for leaf in zip(*flat, strict=True)]
        return pytree.tree_unflatten(joined, pytree.tree_structure(made[0]))

    return loop


def _batched(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def called(model: nn.Module, call: Call, case: Case, sizes: Sequence[int]) -> Observations:
    """Call in every mode and size, run a backward wherever an output has a gradient, and return the observations.

    `model` is the user's model, whose mode is switched, and whose gradients and buffers are observed.
    """
    observed = Observations()
    switch = call if isinstance(call, nn.Module) else model
    for mode in case.modes:
        for size in sizes:
            if model.training != mode:
                switch.train(mode)
            args = case.inputs(size)
            torch.manual_seed(size)
            with case.around():
                made = call(*args)
            _backward(made)
            observed.outputs.append(_values(made))
            gradients = [[p.grad for p in model.parameters()], [a.grad for a in args if _batched(a)]]
            observed.gradients.append([_requires_grad(made), _frozen(gradients)])
            observed.buffers.append(_frozen(dict(model.named_buffers())))
            observed.state.append([_frozen(case.left(model)), float(torch.rand(()))])
            observed.modes.append(mode)
    return observed


def _backward(made: Any) -> None:
    outputs = [t for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor) and t.requires_grad]
    if outputs:
        torch.stack([(t.abs().float() ** 2).sum() for t in outputs]).sum().backward()


def _values(structure: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, structure)


def _requires_grad(structure: Any) -> list[bool]:
    """Return, per tensor, whether it requires a gradient."""
    return [leaf.requires_grad for leaf in pytree.tree_leaves(structure) if isinstance(leaf, torch.Tensor)]


def _frozen(structure: Any) -> Any:
    """Return a copy, with each tensor as (content, requires_grad)."""
    return pytree.tree_map(
        lambda leaf: (leaf.detach().clone(), leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf, structure
    )


def difference(made: Observations, expected: Observations, tolerance: float) -> str:
    """Return the first difference, "" if there is none. `tolerance` is relative, for sums in another order."""
    for aspect in ASPECTS:
        pairs = zip(getattr(made, aspect), getattr(expected, aspect), strict=True)
        for index, (one, other) in enumerate(pairs):
            if not _same(one, other, tolerance):
                wrong = "mode" if index and expected.modes[index] != expected.modes[0] else aspect
                return f"{wrong}: call {index}: {aspect} {one} instead of {other}"
    return ""


def _same(made: Any, expected: Any, tolerance: float) -> bool:
    ours, theirs = pytree.tree_leaves(made), pytree.tree_leaves(expected)
    if len(ours) != len(theirs) or pytree.tree_structure(made) != pytree.tree_structure(expected):
        return False
    return all(_alike(a, b, tolerance) for a, b in zip(ours, theirs, strict=True))


def _alike(one: Any, other: Any, tolerance: float) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and one == other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or torch.allclose(one, other, rtol=tolerance, atol=tolerance / 10, equal_nan=True)
