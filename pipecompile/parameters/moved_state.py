"""State of optimizers that follows its parameters: an optimizer may have stepped, or loaded a checkpoint, before its model is placed.

load_state_dict    weight, exp_avg on the CPU
compile            weight on cuda:1                 exp_avg on the CPU
step               weight on cuda:1   ◄── before ── exp_avg on cuda:1
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

__all__ = ["note_moved"]

_FORMER: dict[int, set[torch.device]] = {}
"""The devices from which parameters were moved, by id: torch swaps no tensors that have weak references."""

_UP_TO_DATE: WeakSet[Optimizer] = WeakSet()
"""Optimizers that have followed all moves."""

_hooks: list[Any] = []


def note_moved(tensor: torch.Tensor, former: torch.device) -> None:
    """Let the state that optimizers keep of a parameter on its `former` device follow it, before their next step."""
    if isinstance(tensor, nn.Parameter):
        _FORMER.setdefault(id(tensor), set()).add(former)
        _UP_TO_DATE.clear()
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_follow))


def _follow(optimizer: Optimizer, *_: Any) -> None:
    if optimizer in _UP_TO_DATE:
        return
    _UP_TO_DATE.add(optimizer)
    for group in optimizer.param_groups:
        counts_there = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            former, state = _FORMER.get(id(parameter), ()), optimizer.state.get(parameter, {})
            for key, value in state.items():
                if not isinstance(value, torch.Tensor) or value.device not in former:
                    continue
                if key != "step" or counts_there or not value.is_cpu:  # most optimizers count their steps on the CPU
                    state[key] = value.to(parameter.device)
