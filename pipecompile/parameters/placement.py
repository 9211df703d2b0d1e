"""Parameters and buffers move to the device of their stage, in place: they stay the tensors that optimizers know.

One that is used on several devices has its home where it is used first, and a mirror on each other device. Those on `meta` are
given memory there, and wait for values.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from threading import Lock

import torch
from torch import fx, nn

from pipecompile.costs.problem_builder import held_by
from pipecompile.driver.specialization import Build
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.stages import Stage
from pipecompile.options import Options
from pipecompile.parameters.tied_mirrors import Borrowing, Mirror, Mirrors
from pipecompile.parameters.uninitialized import Blanks

__all__ = ["Homes", "move_model", "place_stages", "uses"]


def move_model(model: nn.Module, options: Options) -> None:
    """Before measuring: the whole model to the first GPU, when it is to run on GPUs and is to be measured there."""
    device = options.devices[0]
    if device.type == "cuda" and options.cost != "analytic":
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.data.to(device)


class Homes:
    """Where each tensor of a model lives. The first build decides; later ones find it there, or use a mirror."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, Hashable]] = {}
        self.blanks = Blanks()
        self.lock = Lock()

    def of(self, tensor: torch.Tensor, memory: Hashable) -> Hashable:
        """The memory that a tensor lives in; the one it is asked for in when nobody asked before."""
        return self._known.setdefault(id(tensor), (tensor, memory))[1]

    def known(self, tensor: torch.Tensor) -> Hashable | None:
        """The memory that a tensor lives in; None when nobody asked for it."""
        return self._known.get(id(tensor), (tensor, None))[1]

    def bring(self, tensor: torch.Tensor, device: torch.device, *, is_copy: bool = False) -> None:
        """To the device of its home. One on `meta` is blank there, or a copy, which the home tells its values."""
        if tensor.is_meta:
            self.blanks.add(tensor, device, is_copy=is_copy)
        elif tensor.device != device:
            tensor.data = tensor.data.to(device)

    def bring_rest(self, model: nn.Module, device: torch.device) -> None:
        """What `state_dict` has and no stage uses has a home, too."""
        for value in model.state_dict(keep_vars=True).values():
            if isinstance(value, torch.Tensor) and value.is_meta and self.known(value) is None:
                self.bring(value, device)

    def clear(self) -> None:
        self._known.clear()


def place_stages(build: Build, homes: Homes) -> Mirrors:
    """Move every parameter and buffer to its home, and give the stages mirrors of those that live elsewhere."""
    mirrors: dict[tuple[Hashable, int], Mirror] = {}
    for stage, tensor in uses(build):
        memory, device = memory_of(build, stage), build.stage_devices[stage.index]
        if homes.of(tensor, memory) == memory:
            homes.bring(tensor, device)
        elif (memory, id(tensor)) not in mirrors:
            mirrors[memory, id(tensor)] = Mirror.of(tensor, device)
    if mirrors:
        _lend(build, mirrors, homes.lock)
    return Mirrors(mirrors.values())


def memory_of(build: Build, stage: Stage) -> Hashable:
    """What a stage shares with others when they use the very same tensors."""
    return build.stage_devices[stage.index]


def uses(build: Build) -> Iterator[tuple[Stage, torch.Tensor]]:
    """Every tensor that a node uses, with the stage it is used in."""
    stage_of = {name: stage for stage in build.stages for name in stage.nodes}
    for node in compute_nodes(build.graph):
        for tensor in held_by(build.graph, node):
            yield stage_of[node.name], tensor


def _lend(build: Build, mirrors: Mapping[tuple[Hashable, int], Mirror], lock: Lock) -> None:
    """Make the nodes of each stage use its mirrors. A module with a tensor that is mirrored is locked wherever it runs."""
    mirrored = {key for _, key in mirrors}
    for stage in build.stages:
        here = {key: mirror for (memory, key), mirror in mirrors.items() if memory == memory_of(build, stage)}
        for node in list(stage.module.graph.nodes):
            if node.op == "get_attr":
                _lend_attribute(stage.module, node, here)
            elif node.op == "call_module":
                _lend_module(stage.module, node, here, mirrored, lock)
        stage.module.recompile()


def _lend_attribute(stage: fx.GraphModule, node: fx.Node, here: Mapping[int, Mirror]) -> None:
    *parents, name = str(node.target).split(".")
    mirror = here.get(id(getattr(stage.get_submodule(".".join(parents)), name)))
    if mirror is not None:
        node.target = f"mirror_{node.name}"
        setattr(stage, node.target, mirror.copy)


def _lend_module(
    stage: fx.GraphModule, node: fx.Node, here: Mapping[int, Mirror], mirrored: set[int], lock: Lock
) -> None:
    module = stage.get_submodule(str(node.target))
    tied = [place for place in _places(module) if id(getattr(*place)) in mirrored]
    if tied:
        loans = [(*place, here[id(getattr(*place))]) for place in tied if id(getattr(*place)) in here]
        node.target = f"mirror_{node.name}"
        stage.add_module(node.target, Borrowing(module, loans, lock))


def _places(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Where the tensors of a module are: owner and name."""
    for owner in module.modules():
        for name in (*owner._parameters, *owner._buffers):
            yield owner, name
