"""Optimizer state by parameter names, in the flat form of `torch.distributed.checkpoint.state_dict`:

    state.layer1.weight.exp_avg   state.layer1.weight.step   param_groups.layer1.weight.lr ...

Every rank has the entries of its own parameters, so another layout, or plain PyTorch, can load them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipecompile.errors import InputError, described
from pipecompile.parameters.initial_state import initialised
from pipecompile.text.shown_value import shown
from pipecompile.torch_private.modules import children_of

__all__ = ["load_optimizer_state", "optimizer_state_of"]


def optimizer_state_of(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, elsewhere: Collection[nn.Parameter] = ()
) -> dict[str, Any]:
    """Return the state of `optimizer` by the names of `parameters`. Before the first step, return the initial state, and leave the
    optimizer without one.

    The optimizer may have the parameters `elsewhere`, too, which live on other ranks. Without parameters here it has no state.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    with _prepared(optimizer, parameters.values(), elsewhere) as has_parameters:
        if not has_parameters:
            return {}
        with initialised(optimizer):
            return dict(get_optimizer_state_dict(_tree(parameters), optimizer, options=_flat()))


def load_optimizer_state(
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    elsewhere: Collection[nn.Parameter] = (),
) -> None:
    """Load `state`, as returned by `optimizer_state_of`, into `optimizer`. One before its first step stays so if `state` is the initial
    one: its first step makes the state with its own rate, as without a checkpoint.
    """
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    hint = "pipe.load_optimizer_state_dict(optimizer, pipe.optimizer_state_dict(optimizer))"
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise InputError(f"state_dict={shown(state)} is not a dictionary by names", hint=hint)
    with _prepared(optimizer, parameters.values(), elsewhere) as has_parameters:
        if not has_parameters:
            return
        if not state:
            raise InputError("state_dict is of another optimizer", why="it is empty", hint=hint)
        try:
            with initialised(optimizer) as initial:
                set_optimizer_state_dict(_tree(parameters), optimizer, dict(state), options=_flat())
                initial.keep_others()
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
def _prepared(
    optimizer: torch.optim.Optimizer, own: Iterable[nn.Parameter], elsewhere: Collection[nn.Parameter]
) -> Iterator[bool]:
    """Remove gradients, parameters that live `elsewhere`, and groups without parameters from `optimizer` for the length of the context,
    which gets whether any are left: a rank whose stages are frozen has none.

    PyTorch saves no state of a new optimizer while parameters have gradients, and fails on
    a group without parameters on this rank. An optimizer that was made before the model was cut has those of other ranks, too.
    Raises InputError for parameters that are neither.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"optimizer={shown(optimizer)} is not an optimizer", hint="optimizer=torch.optim.Adam(pipe.parameters())"
        )
    gradients = [(parameter, parameter.grad) for group in optimizer.param_groups for parameter in group["params"]]
    absent = set(map(id, elsewhere))
    _check_known(gradients, {*map(id, own), *absent})
    wholes = [group["params"] for group in optimizer.param_groups]
    others = {key: optimizer.state.pop(key) for key in [*optimizer.state] if id(key) in absent}
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in absent]
    empty = [(index, group) for index, group in enumerate(optimizer.param_groups) if not group["params"]]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        yield bool(optimizer.param_groups)
    finally:
        for index, group in empty:
            optimizer.param_groups.insert(index, group)
        for group, whole in zip(optimizer.param_groups, wholes, strict=True):
            group["params"] = whole
        optimizer.state.update(others)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _check_known(gradients: Sequence[tuple[nn.Parameter, Any]], known: Collection[int]) -> None:
    if foreign := [tuple(parameter.shape) for parameter, _ in gradients if id(parameter) not in known]:
        raise InputError(
            f"the optimizer has parameters that are not the pipeline's: {len(foreign)}, the first of shape {foreign[0]}",
            why="states are kept by the names that parameters have in the model",
            hint="an optimizer of their own for other parameters, such as those of a loss",
        )
