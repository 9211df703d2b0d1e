"""Optimizer state by parameter names, in the flat form of `torch.distributed.checkpoint.state_dict`:

    state.layer1.weight.exp_avg   state.layer1.weight.step   param_groups.layer1.weight.lr ...

Every rank has the entries of its own parameters, so another layout, or plain PyTorch, can load them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipecompile.errors import InputError, described
from pipecompile.ir.shown_value import shown
from pipecompile.torch_private.modules import children_of

__all__ = ["load_optimizer_state", "optimizer_state_of"]


def optimizer_state_of(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of `optimizer` by the names of `parameters`. An optimizer before its first step gets its initial state."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    with _prepared(optimizer):
        return dict(get_optimizer_state_dict(_tree(parameters), optimizer, options=_flat()))


def load_optimizer_state(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Load `state`, as returned by `optimizer_state_of`, into `optimizer`."""
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    hint = "pipe.load_optimizer_state_dict(optimizer, pipe.optimizer_state_dict(optimizer))"
    if not isinstance(state, Mapping) or not state or not all(isinstance(key, str) for key in state):
        raise InputError(f"state_dict={shown(state)} is no dictionary by names", hint=hint)
    with _prepared(optimizer):
        try:
            set_optimizer_state_dict(_tree(parameters), optimizer, dict(state), options=_flat())
        except (KeyError, TypeError, ValueError) as error:
            why = described(error)
            raise InputError("state_dict is of another optimizer", why=why, hint=hint) from error


def _flat() -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(flatten_optimizer_state_dict=True)


def _tree(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """Return a module with exactly these parameters under these names."""
    root = nn.Module()
    for name, parameter in parameters.items():
        owner, *path = root, *name.split(".")
        for part in path[:-1]:
            if part not in children_of(owner):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(path[-1], parameter)
    return root


@contextmanager
def _prepared(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Remove gradients and empty parameter groups from `optimizer` for the length of the context.

    PyTorch creates the state of a new optimizer by a step without effect, but not while parameters have gradients, and fails on
    a group without parameters on this rank.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"optimizer={shown(optimizer)} is no optimizer", hint="optimizer=torch.optim.Adam(pipe.parameters())"
        )
    gradients = [(parameter, parameter.grad) for group in optimizer.param_groups for parameter in group["params"]]
    empty = [(index, group) for index, group in enumerate(optimizer.param_groups) if not group["params"]]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        yield
    finally:
        for index, group in empty:
            optimizer.param_groups.insert(index, group)
        for parameter, gradient in gradients:
            parameter.grad = gradient
