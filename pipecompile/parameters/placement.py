"""Placement of parameters and buffers on the device of their stage, in place: optimizers keep their references.

A tensor used on several devices has its home on the device of its first use, and a mirror on each other device. A tensor on
`meta` gets memory at its home and counts as uninitialized until its values are written.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock

import torch
from torch import fx, nn

from pipecompile.errors import InfeasibleError, InputError
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.module_names import held_tensors
from pipecompile.graph.stages import Stage
from pipecompile.parameters.moved_state import note_moved
from pipecompile.parameters.tied_mirrors import Mirror, MirroredModule, Mirrors
from pipecompile.parameters.uninitialized import UninitializedTensors
from pipecompile.text.units import BYTES, written
from pipecompile.torch_private.accelerators import is_accelerator
from pipecompile.torch_private.modules import buffers_of, parameters_of
from pipecompile.torch_private.recurrent_layers import flatten_weights

__all__ = ["Homes", "move_model", "place_stages", "tensor_uses"]


def move_model(model: nn.Module, device: torch.device) -> Callable[[], None]:
    """Move the whole model to `device`, where its operations are measured, if `device` is a GPU. Skip tensors on meta.

    Return a function that moves the model back. Raise OutOfMemoryError, with the model where it was, if it does not fit.
    """
    moved: list[tuple[torch.Tensor, torch.device]] = []

    def move_back() -> None:
        for tensor, home in moved:
            _put(tensor, home)

    try:
        for tensor in (*model.parameters(), *model.buffers()) if is_accelerator(device) else ():
            if not tensor.is_meta and tensor.device != device:
                here = tensor.device
                _put(tensor, device)
                moved.append((tensor, here))
        flatten_weights(model.modules())
    except torch.OutOfMemoryError:
        move_back()
        raise
    return move_back


def _put(tensor: torch.Tensor, device: torch.device) -> None:
    """Move a tensor to `device`, and its gradient with it, as `Module.to` does."""
    tensor.data = tensor.data.to(device)
    if tensor.is_leaf and tensor.grad is not None:
        tensor.grad.data = tensor.grad.data.to(device)


class Homes:
    """The memory in which each tensor of a model lives: set by the first build, kept by later builds, which use mirrors.

    `rest` is the memory of tensors that have no home; None if they stay where they are.
    """

    def __init__(self) -> None:
        self._homes: dict[int, tuple[torch.Tensor, Hashable]] = {}
        self._moved: list[tuple[torch.Tensor, torch.device]] | None = None
        self.rest: Hashable | None = None
        self.uninitialized = UninitializedTensors()
        self.lock = Lock()

    def assign(self, tensor: torch.Tensor, memory: Hashable) -> Hashable:
        """Return the home of `tensor`. A tensor without a home gets `memory` as its home."""
        return self._homes.setdefault(id(tensor), (tensor, memory))[1]

    def find(self, tensor: torch.Tensor) -> Hashable | None:
        """Return the home of `tensor`; None if `tensor` has no home."""
        return self._homes.get(id(tensor), (tensor, None))[1]

    def move(self, tensor: torch.Tensor, device: torch.device, *, is_copy: bool = False) -> None:
        """Move `tensor` to `device`. A tensor on meta gets memory there and is uninitialized.

        `is_copy`: another process is the home of `tensor` and sends its values before every run.
        """
        if tensor.is_meta:
            self.uninitialized.add(tensor, device, is_copy=is_copy)
        elif tensor.device != device:
            here = tensor.device
            _put(tensor, device)
            note_moved(tensor, here)
            if self._moved is not None:
                self._moved.append((tensor, here))

    def move_unused(self, model: nn.Module, device: torch.device) -> None:
        """Give memory on `device` to the tensors of `model.state_dict()` on meta that no stage uses."""
        for value in model.state_dict(keep_vars=True).values():
            if isinstance(value, torch.Tensor) and value.is_meta and self.find(value) is None:
                self.move(value, device)

    def assign_unused(self, model: nn.Module, memory: Hashable) -> None:
        """Assign `memory` to the parameters and buffers of `model` that have no home, and to `rest`."""
        self.rest = memory
        for tensor in (*model.parameters(), *model.buffers()):
            self.assign(tensor, memory)

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Undo what a failing block has moved and which homes it has made. What came from meta keeps its memory."""
        before, self._moved = dict(self._homes), []
        try:
            yield
        except BaseException:
            self._homes = before
            for tensor, device in self._moved:
                _put(tensor, device)
            raise
        finally:
            self._moved = None

    def keep(self, model: nn.Module) -> None:
        """Forget the homes of tensors that `model` no longer has as parameters or buffers, unless they are plain attributes."""
        present = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        gone = [
            key for key, (tensor, _) in self._homes.items() if isinstance(tensor, nn.Parameter) and key not in present
        ]
        for key in gone:
            del self._homes[key]

    def __bool__(self) -> bool:
        return bool(self._homes)

    def take(self, others: Homes, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Take the homes of the tensors of another model; `pairs` has each of them with its copy."""
        for tensor, own in pairs:
            if (home := others.find(tensor)) is not None:
                self.assign(own, home)
        self.rest = others.rest

    def clear(self) -> None:
        """Forget all homes. Tensors stay where they are."""
        self._homes.clear()
        self.rest = None


def place_stages(
    graph: fx.GraphModule,
    stages: Sequence[Stage],
    stage_devices: Sequence[torch.device],
    memories: Sequence[Hashable],
    homes: Homes,
    peaks: Sequence[float] = (),
) -> Mirrors:
    """Move every parameter and buffer to its home. Return the mirrors, which the stages now use for tensors with another home.

    `memories` has a key per stage: stages with equal keys use the same tensor objects. `peaks` are the predicted bytes of each stage's
    device in a step. Raise InfeasibleError, with the tensors where they were, if a device has too little memory.
    """
    mirrors: dict[tuple[Hashable, int], Mirror] = {}
    with homes.all_or_none():
        for stage, tensor in tensor_uses(graph, stages):
            memory, device = memories[stage.index], stage_devices[stage.index]
            is_placed = homes.find(tensor) == memory
            with _fitting(stage, device, peaks):
                if homes.assign(tensor, memory) == memory:
                    if is_placed and tensor.device != device:
                        raise _moved(tensor, device, stage)
                    homes.move(tensor, device)
                elif (memory, id(tensor)) not in mirrors:
                    mirrors[memory, id(tensor)] = Mirror.of(tensor, device)
        for stage in stages:
            with _fitting(stage, stage_devices[stage.index], peaks):
                flatten_weights(stage.module.modules())
    if mirrors:
        _bind_mirrors(stages, memories, mirrors, homes.lock)
    return Mirrors(tuple(mirrors.values()))


@contextmanager
def _fitting(stage: Stage, device: torch.device, peaks: Sequence[float]) -> Iterator[None]:
    """Raise InfeasibleError where `device` has too little memory for a tensor of `stage`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        predicted = f"; the predicted peak of a step there is {written(BYTES, peaks[stage.index])}" if peaks else ""
        raise InfeasibleError(
            f"the parameters of stage {stage.index} do not fit on {device}, which is out of memory{predicted}",
            why="something else holds memory of the device, or the plan was made for more of it",
            hint="more stages, or memory_limit= with the bytes that are free on each device",
        ) from error


def _moved(tensor: torch.Tensor, device: torch.device, stage: Stage) -> InputError:
    return InputError(
        f"a tensor of the model, of shape {tuple(tensor.shape)}, was moved to {tensor.device} after it was placed",
        where=f"stage {stage.index}, on {device}",
        why="the plan places the stages; the model was moved itself, or by a module that contains it",
        hint="leave the model where the pipeline has put it, or compile again with devices=",
    )


def tensor_uses(graph: fx.GraphModule, stages: Sequence[Stage]) -> Iterator[tuple[Stage, torch.Tensor]]:
    """Yield every parameter and buffer that a node of a stage uses, with that stage, in the order of the graph."""
    stage_of = {name: stage for stage in stages for name in stage.nodes}
    for node in compute_nodes(graph):
        for tensor in held_tensors(graph, node) if node.name in stage_of else ():
            yield stage_of[node.name], tensor


def _bind_mirrors(
    stages: Sequence[Stage], memories: Sequence[Hashable], mirrors: Mapping[tuple[Hashable, int], Mirror], lock: Lock
) -> None:
    """Let the nodes of each stage use the mirrors of its memory. Every call of a module with a mirrored tensor takes `lock`."""
    mirrored = {key for _, key in mirrors}
    for stage in stages:
        local = {key: mirror for (memory, key), mirror in mirrors.items() if memory == memories[stage.index]}
        for node in list(stage.module.graph.nodes):
            if node.op == "get_attr":
                _bind_attribute(stage.module, node, local)
            elif node.op == "call_module":
                _bind_module(stage.module, node, local, mirrored, lock)
        stage.module.recompile()


def _bind_attribute(stage: fx.GraphModule, node: fx.Node, local: Mapping[int, Mirror]) -> None:
    *parents, name = str(node.target).split(".")
    mirror = local.get(id(getattr(stage.get_submodule(".".join(parents)), name)))
    if mirror is not None:
        node.target = f"mirror_{node.name}"
        setattr(stage, node.target, mirror.copy)


def _bind_module(
    stage: fx.GraphModule, node: fx.Node, local: Mapping[int, Mirror], mirrored: set[int], lock: Lock
) -> None:
    module = stage.get_submodule(str(node.target))
    tied = [slot for slot in _tensor_slots(module) if id(getattr(*slot)) in mirrored]
    if tied:
        substitutions = [(*slot, local[id(getattr(*slot))]) for slot in tied if id(getattr(*slot)) in local]
        node.target = f"mirror_{node.name}"
        stage.add_module(node.target, MirroredModule(module, substitutions, lock))


def _tensor_slots(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield (owner, attribute name) of every parameter and buffer in `module`."""
    for owner in module.modules():
        for name in (*parameters_of(owner), *buffers_of(owner)):
            yield owner, name
