"""Parameters that a model was given after it was cut: each lives on the rank that ran its module, or the nearest module around it.

    model[1] = Block()               1.linear.weight lives where model[1] ran; if the next cut puts it elsewhere, that stage has a copy
    weight_norm(model[2].linear)     parametrizations are computed from the trained weight, which other ranks do not have

So `pipe.parameters()` has them before the next call, and they are the same after it: an optimizer that was made in between updates each once.
"""

from __future__ import annotations

from torch import nn

from pipecompile.driver.specialization import Specialization
from pipecompile.graph.module_names import module_of
from pipecompile.parameters.placement import Homes
from pipecompile.torch_private.modules import modules_in, parameters_of

__all__ = ["home_new_parameters"]


def home_new_parameters(model: nn.Module, homes: Homes, recording: Specialization) -> list[nn.Parameter]:
    """Give homes to the parameters of a model that have none, and return them. All ranks must have the same earlier recording."""
    if not _has_new(model, homes):
        return []
    new = {name: parameter for name, parameter in model.named_parameters() if homes.find(parameter) is None}
    devices = _devices(recording)
    for name, parameter in new.items():
        homes.assign(parameter, next(devices[path] for path in _around(name) if path in devices))
    return [*new.values()]


def _has_new(model: nn.Module, homes: Homes) -> bool:
    """Return whether a parameter has no home."""
    for module in modules_in(model):
        if any(one is not None and homes.find(one) is None for one in parameters_of(module).values()):
            return True
    return False


def _devices(recording: Specialization) -> dict[str, int]:
    """Return, per path of a module, the pipeline device of the first operation in it; for "" at least, that of the last stage."""
    placement = recording.plan.placement
    stages = {node: placement[stage.index] for stage in recording.stages for node in stage.nodes}
    devices: dict[str, int] = {}
    for node in recording.graph.graph.nodes:
        if node.name in stages:
            for path in _around(f"{module_of(node)}."):
                devices.setdefault(path, stages[node.name])
    return {"": placement[-1]} | devices


def _around(name: str) -> list[str]:
    """Return the paths of the modules around a name, the nearest first and the model's own, "", last."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)] + [""]
