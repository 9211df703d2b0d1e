"""Extra state of modules (`get_extra_state`), which is not a tensor: it lives on the rank that runs the module.

counted.n += 1 in its forward    the rank of the stage that writes there
a module that only reads         the rank of its first operation; without operations of its own, that of a module inside it
a module that does not run       the rank of the last stage, as its tensors do
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from pipecompile.driver.specialization import Specialization
from pipecompile.graph.module_names import module_of
from pipecompile.torch_private.modules import EXTRA_STATE

__all__ = ["device_of_module", "extra_state_keys"]


def extra_state_keys(model: nn.Module) -> dict[str, str]:
    """Return the keys of extra state in the model's `state_dict`, and the names of their modules."""
    names = (
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    )
    return {f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE: name for name in names}


def device_of_module(model: nn.Module, name: str, recordings: Sequence[Specialization]) -> int:
    """Return the pipeline device that runs a module, by the recordings of a model, the last used last."""
    module = model.get_submodule(name)
    for recording in reversed(recordings):
        for device in _writers(module, recording):
            return device
    latest = recordings[-1]
    homes = {node: latest.plan.placement[stage.index] for stage in latest.stages for node in stage.nodes}
    nodes = [(module_of(node), homes[node.name]) for node in latest.graph.graph.nodes if node.name in homes]
    own = [device for path, device in nodes if path == name]
    inside = [device for path, device in nodes if not name or path.startswith(f"{name}.")]
    return next(iter([*own, *inside]), latest.plan.placement[-1])


def _writers(module: nn.Module, recording: Specialization) -> Iterator[int]:
    """Yield the devices of the stages that write attributes of a module, or what is in them."""
    attributes = vars(module)
    containers = {id(attributes), *map(id, _containers(attributes.values()))}
    for stage in recording.stages:
        for node in stage.module.graph.nodes:
            place = getattr(node.target, "place", None)
            if place is not None and id(place.container) in containers:
                yield recording.plan.placement[stage.index]


def _containers(values: Iterable[object]) -> Iterator[object]:
    return (value for value in values if isinstance(value, (list, dict, set)))
