"""State of optimizers that follows its parameters: an optimizer may have stepped, or loaded a checkpoint, before its model is placed.

load_state_dict    weight, exp_avg on the CPU
compile            weight on cuda:1                 exp_avg on the CPU
step               weight on cuda:1   ◄── before ── exp_avg on cuda:1
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["note_moved"]

_FORMER: MutableMapping[nn.Parameter, set[torch.device]] = WeakIdKeyDictionary()
"""The devices from which parameters were moved."""

_UP_TO_DATE: WeakSet[Optimizer] = WeakSet()
"""Optimizers that have followed all moves."""

_hooks: list[Any] = []


def note_moved(tensor: torch.Tensor, former: torch.device) -> None:
    """Let the state that optimizers keep of a parameter on its `former` device follow it, before their next step."""
    if isinstance(tensor, nn.Parameter):
        _FORMER.setdefault(tensor, set()).add(former)
        _UP_TO_DATE.clear()
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_follow))


def _follow(optimizer: Optimizer, *_: Any) -> None:
    if optimizer in _UP_TO_DATE:
        return
    _UP_TO_DATE.add(optimizer)
    for group in optimizer.param_groups:
        has_steps = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            former, state = _FORMER.get(parameter, ()), optimizer.state.get(parameter, {})
            for key, value in state.items():
                is_beside = key != "step" or has_steps  # the other optimizers of torch count their steps on the CPU
                if isinstance(value, torch.Tensor) and value.device in former and is_beside:
                    state[key] = value.to(parameter.device)
