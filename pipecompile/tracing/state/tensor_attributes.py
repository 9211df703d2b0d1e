"""Attributes that code sets on tensors: those that a forward writes, `self.weight.calls = 1`, and those of inputs."""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType

import torch
from torch import nn

from pipecompile.batching.call_inputs import FlatInputs
from pipecompile.errors import RecordingWarning
from pipecompile.tracing.fakes.fake_tensors import Twins, user_attributes
from pipecompile.tracing.loaded_names import attribute_names
from pipecompile.tracing.reachable_code import reachable
from pipecompile.tracing.state.leftover_state import StateChange
from pipecompile.tracing.state.snapshot import Place
from pipecompile.tracing.user_source import warn

__all__ = ["attribute_changes", "warn_of_inputs"]


def attribute_changes(model: nn.Module, twins: Twins, functions: Iterable[FunctionType]) -> list[StateChange]:
    """Return the attributes that a recording has written on the twins of tensors, among those that the functions name."""
    written = twins.written_attributes(_named_by(functions))
    if not written:
        return []
    paths = {id(twin): path for path, twin in (*model.named_parameters(), *model.named_buffers())}
    changes = []
    for tensor, twin, name in written:
        owner, _, label = paths.get(id(twin), "a tensor").rpartition(".")
        own = user_attributes(tensor)
        changes.append(StateChange(Place(own, owner, label), name, own.get(name), vars(twin).get(name)))
    return changes


def warn_of_inputs(inputs: FlatInputs, model: nn.Module) -> None:
    """Warn of inputs with attributes that the code of a model names: micro-batches are other tensors, without these attributes."""
    pairs = zip(inputs.names, inputs.leaves, strict=True)
    marked = [(name, own) for name, leaf in pairs if isinstance(leaf, torch.Tensor) and (own := user_attributes(leaf))]
    names = _named_by(reachable(model).functions) if marked else frozenset()
    for name, own in marked:
        if read := sorted(names & own.keys()):
            what = f"input {name} has {', '.join(read)} set on it, which its micro-batches do not have: pass what the forward reads as an argument"
            warn(what, RecordingWarning)


def _named_by(functions: Iterable[FunctionType]) -> frozenset[str]:
    return frozenset[str]().union(*(attribute_names(function.__code__) for function in functions))
