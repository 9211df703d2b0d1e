"""The state of an optimizer by the names of parameters, as `torch.distributed.checkpoint.state_dict` has it, flat:

    state.layer1.weight.exp_avg   state.layer1.weight.step   param_groups.layer1.weight.lr ...

So every rank has the entries of its own parameters, and any other layout, or plain PyTorch, finds those of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipecompile.torch_private.modules import children_of

__all__ = ["load_optimizer_state", "optimizer_state_of"]


def optimizer_state_of(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """One that has made no step yet is given the state that it would begin with."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    with _begun(optimizer):
        return dict(get_optimizer_state_dict(_tree(parameters), optimizer, options=_flat()))


def load_optimizer_state(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    with _begun(optimizer):
        set_optimizer_state_dict(_tree(parameters), optimizer, dict(state), options=_flat())


def _flat() -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(flatten_optimizer_state_dict=True)


def _tree(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """A model that has these parameters under these names, and nothing else."""
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
def _begun(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """PyTorch makes the state of a new optimizer by a step without effect, but not while there are gradients; and it does not
    know what to do with a group of which no parameter is on this rank.
    """
    kept = [(parameter, parameter.grad) for group in optimizer.param_groups for parameter in group["params"]]
    empty = [(place, group) for place, group in enumerate(optimizer.param_groups) if not group["params"]]
    try:
        for parameter, _ in kept:
            parameter.grad = None
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        yield
    finally:
        for place, group in empty:
            optimizer.param_groups.insert(place, group)
        for parameter, gradient in kept:
            parameter.grad = gradient
