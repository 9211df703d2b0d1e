"""The state of an optimizer before its first step, which most optimizers make in that step: shown, and taken away again.

    {}  ─ step of gradient 0 and rate 0 ─►  exp_avg 0, exp_avg_sq 0, step 1  ─ counter ─►  step 0       as checkpoints have it
    {}  ◄─ the optimizer afterwards: its first step is the first

Hooks of the optimizer do not run, and its groups, attributes and counters are those from before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from pipecompile.torch_private.dtensors import local

__all__ = ["InitialState", "initialised"]

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_COUNTER = "step"
"""The key under which optimizers of torch count the steps of a parameter."""


@dataclass(slots=True)
class InitialState:
    """The initial `state` of an optimizer, which it has for the length of a context; {} of one that has made a step."""

    optimizer: torch.optim.Optimizer
    state: Mapping[torch.Tensor, Any] = field(default_factory=dict)
    is_temporary: bool = True

    def keep_others(self) -> None:
        """Leave the state that the optimizer has by now, unless that is the initial one."""
        present = self.optimizer.state
        self.is_temporary = bool(self.state) and _is_same(self.state, present)


@contextmanager
def initialised(optimizer: torch.optim.Optimizer) -> Iterator[InitialState]:
    """Give an optimizer before its first step its initial state for the length of the context. Its parameters have no gradients."""
    if optimizer.state:
        yield InitialState(optimizer)
        return
    with _restored(optimizer):
        _step_without_effect(optimizer)
    initial = InitialState(optimizer, {key: _at_zero(entries) for key, entries in optimizer.state.items()})
    optimizer.state.update(initial.state)
    first = optimizer.param_groups[0]["params"][0]
    first.grad = torch.zeros_like(first)  # or torch makes such a step itself, if the optimizer has no state at all
    try:
        yield initial
    finally:
        first.grad = None
        if initial.is_temporary:
            optimizer.state.clear()


@contextmanager
def _restored(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Give attributes and groups back as they were. Within the context no hook runs, nor what a scheduler has put around `step`."""
    own, groups = vars(optimizer), [dict(group) for group in optimizer.param_groups]
    before = dict(own)
    own.pop("step", None)
    own.update({name: OrderedDict() for name in _HOOKS if name in own})
    try:
        yield
    finally:
        own.clear()
        own.update(before)
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(values)


def _step_without_effect(optimizer: torch.optim.Optimizer) -> None:
    """Make a step with gradients and rates of 0, from which no parameter changes, without the hooks of all optimizers."""
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    trained = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    step: Any = type(optimizer).step
    try:
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        (step.__wrapped__ if hasattr(step, "hooked") else step)(optimizer, closure=None)
    finally:
        for parameter in trained:
            parameter.grad = None


def _at_zero(entries: Any) -> Any:
    """Return the entries of a parameter, with its counter at zero."""
    if not isinstance(entries, dict) or _COUNTER not in entries:
        return entries
    count = entries[_COUNTER]
    return {**entries, _COUNTER: torch.zeros_like(count) if isinstance(count, torch.Tensor) else type(count)(0)}


def _is_same(first: Any, second: Any) -> bool:
    """Return whether two states have equal values, on this rank."""
    if isinstance(first, Mapping):
        is_alike = isinstance(second, Mapping) and first.keys() == second.keys()
        return is_alike and all(_is_same(value, second[key]) for key, value in first.items())
    if isinstance(first, torch.Tensor):
        is_alike = isinstance(second, torch.Tensor) and not first.is_meta and first.shape == second.shape
        return is_alike and torch.equal(
            local(first).to(local(second)), local(second)
        )  # torch loads in the type of the parameter
    return type(first) is type(second) and bool(first == second)
