"""Side effects of running a stage, found in its graph: what a recomputation has to restore, and what other stages may meet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from pipecompile.graph.stages import Stage
from pipecompile.graph.tensor_settings import flagged_memory
from pipecompile.runtime.cells.kept_gradients import names_retain_grad
from pipecompile.runtime.cells.loss_draws import LossDraws
from pipecompile.runtime.cells.loss_writes import LossWrites
from pipecompile.torch_private.kernel_settings import set_kernel_settings
from pipecompile.torch_private.modes import enter_autocast
from pipecompile.torch_private.modules import backward_hooks_of, forward_hooks_of
from pipecompile.torch_private.storages import storage_key
from pipecompile.tracing.emit.call_objects import remade
from pipecompile.tracing.guards.lifted_state import NOTHING_LIFTED, LiftedState
from pipecompile.tracing.leaf_modules import has_own_python
from pipecompile.tracing.node_facts import facts
from pipecompile.tracing.opaque.drawn_generators import drawn_generators
from pipecompile.tracing.opaque.opaque_module import OpaqueModule, runs_python
from pipecompile.tracing.reachable_code import is_foreign
from pipecompile.tracing.state.change_log import StateHolders
from pipecompile.tracing.state.effect_places import EffectPlace
from pipecompile.tracing.state.function_state import generators_near
from pipecompile.tracing.state.random_states import RandomSource, generator_sources, random_sources

__all__ = ["SideEffects", "called_modules"]


@dataclass(frozen=True)
class SideEffects:
    """Side effects of running a stage, found in its graph.

    draws             the stage draws random numbers
    written_buffers   tensors of the model that it may write
    reread_buffers    those that it also reads elsewhere than where it writes them
    written_inputs    places of the inputs that it writes in place
    loss_inputs       places of the inputs that the loss behind it gets, and may write
    retains           it has calls of `retain_grad`
    casts             it has autocast regions
    sets_kernels      it sets kernels for a part of its forward (`sdpa_kernel`), which the whole process sees
    redraws           a region of the user's own checkpointing draws its random numbers again in the backward
    generators        the sources that its calls name as generators, and those that Python of its opaque pieces may draw from
    loss              whether the loss behind it draws; None without a user loss
    loss_writes       the tensors that this loss writes; None without a user loss
    lifted            the numbers of the model that it reads at every run
    places            where its effect nodes write
    runs_python       it has user pieces that are kept whole, or hooks of layers
    flagged           tensors of the model whose `requires_grad` its nodes set
    hooks_backward    its backward may run user code: hooks on tensors and layers, autograd functions, regions, these pieces
    remakes           it makes functions anew for each micro-batch, with the objects that they hold
    holders           the modules and functions whose state these, and the loss, may change
    """

    draws: bool = False
    written_buffers: tuple[torch.Tensor, ...] = ()
    written_inputs: tuple[int, ...] = ()
    casts: bool = False
    redraws: bool = False
    generators: tuple[RandomSource, ...] = ()
    lifted: LiftedState = NOTHING_LIFTED
    places: tuple[EffectPlace, ...] = ()
    runs_python: bool = False
    holders: tuple[Any, ...] = ()
    reread_buffers: tuple[torch.Tensor, ...] = ()
    loss: LossDraws | None = None
    loss_writes: LossWrites | None = None
    loss_inputs: tuple[int, ...] = ()
    retains: bool = False
    sets_kernels: bool = False
    hooks_backward: bool = False
    flagged: tuple[torch.Tensor, ...] = ()
    remakes: bool = False

    @cached_property
    def keeps_gradients(self) -> bool:
        """Return whether the stage, or Python in it or of the loss behind it, may ask for the gradients of tensors."""
        return self.retains or names_retain_grad(self.holders)

    @property
    def has_drawn(self) -> bool:
        """Return whether a forward draws random numbers, or the loss behind it was seen to draw."""
        return self.draws or (self.loss is not None and bool(self.loss.drew))

    def may_draw_on(self, device: torch.device) -> bool:
        """Return whether a forward draws random numbers, or Python in it or the loss behind it may."""
        return self.draws or self.runs_python or (self.loss is not None and self.loss.may_draw_on(device))

    @cached_property
    def is_stateless(self) -> bool:
        """Return whether a forward neither draws, nor writes buffers or inputs, nor reads numbers, nor leaves values on the model."""
        kept = self.draws, self.written_buffers, self.written_inputs, self.lifted is not NOTHING_LIFTED, self.places
        return not any((*kept, self.holders, self.loss_inputs, self.retains, self.flagged))

    @property
    def leaves_values(self) -> bool:
        """Return whether the stage leaves values on objects, or Python in it may."""
        return bool(self.places or self.runs_python)

    @property
    def is_stateful(self) -> bool:
        """Return whether the stage leaves values on objects, or Python in it or of the loss behind it may."""
        return self.leaves_values or bool(self.holders)

    @cached_property
    def state_holders(self) -> StateHolders:
        """The holders, with the objects near them, and the places."""
        return StateHolders(self.holders, self.places)

    @classmethod
    def of(cls, stage: Stage) -> SideEffects:
        """Return the side effects of a stage."""
        inputs = [node for node in stage.module.graph.nodes if node.op == "placeholder"][: len(stage.inputs)]
        nodes = [node for node in stage.module.graph.nodes if node.op != "placeholder"]
        written = {storage for node in nodes for storage in facts(node).mutates}
        buffers = tuple({id(tensor): tensor for tensor in _written_tensors(stage.module, nodes, written)}.values())
        counts = _uses(stage.module, nodes)
        return cls(
            any(facts(node).draws for node in nodes),
            buffers,
            tuple(place for place, node in enumerate(inputs) if written & facts(node).storages),
            any(node.target is enter_autocast for node in nodes),
            any(noted.draws and noted.region and noted.region.keeps_draws for noted in map(facts, nodes)),
            _sources(stage.module, nodes),
            next((node.target.state for node in nodes if hasattr(node.target, "state")), NOTHING_LIFTED),
            tuple(node.target.place for node in nodes if hasattr(node.target, "place")),
            bool(called := [one for one in _called_modules(stage.module, nodes) if runs_python(one)]),
            tuple(one.owner[0] if isinstance(one, OpaqueModule) else one for one in called),
            tuple(one for one in buffers if one.layout is torch.strided and counts[storage_key(one)] > 1),
            retains=any(node.op == "call_method" and node.target == "retain_grad" for node in nodes),
            sets_kernels=any(node.target is set_kernel_settings for node in nodes),
            hooks_backward=any(_hooks_backward(stage.module, node) for node in nodes),
            remakes=any(node.target is remade for node in nodes),
            flagged=tuple(_attributes_in(stage.module, nodes, flagged_memory(nodes))),
        )


def _written_tensors(module: fx.GraphModule, nodes: Sequence[fx.Node], written: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors of the model that the nodes of a stage may write."""
    for node in nodes:
        if node.op == "call_module" and facts(node).mutates:
            called = module.get_submodule(str(node.target))
            yield from called.buffers()
            if isinstance(called, OpaqueModule):
                yield from called.written
            elif len(facts(node).mutates) > _n_declared(called):
                yield from called.parameters()
        elif node.op == "call_module" and facts(node).reads & written:  # the hook of another layer writes it
            called = module.get_submodule(str(node.target))
            yield from (*called.parameters(), *called.buffers())
        else:
            yield from _attributes_in(module, [node], written)


def _n_declared(layer: nn.Module) -> int:
    """Return how many keys of memory a call of a layer in its mode counts as written, whether it writes or not: those of its buffers in
    training.
    """
    buffers = layer.buffers() if layer.training else ()
    return len({storage_key(one) if one.layout is torch.strided else id(one) for one in buffers})


def _attributes_in(module: fx.GraphModule, nodes: Sequence[fx.Node], memory: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors that nodes of attributes name and that are in this memory."""
    for node in nodes:
        if node.op == "get_attr" and memory & facts(node).storages:
            yield _attribute(module, node)


def _uses(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> Counter[int]:
    """Return, by memory, how many nodes use each tensor of the model; some calls of layers and pieces count as two."""
    attributes = {node for node in nodes if node.op == "get_attr"}
    keys = {key: _held_key(module, node) for node in attributes for key in facts(node).storages}
    counts: Counter[int] = Counter()
    for node in nodes:
        if node.op == "call_module":
            counts.update(_held_uses(module.get_submodule(str(node.target))))
        if node not in attributes:
            used = {key for one in (node, *node.all_input_nodes) for key in (*facts(one).storages, *facts(one).mutates)}
            counts.update({keys[key] for key in used & keys.keys()})
    return counts


def _held_uses(called: nn.Module) -> dict[int, int]:
    """Return, by memory, the uses of the tensors of a layer or piece in one call. What Python of the user may write, it may also read
    elsewhere; autograd saves parameters, but no buffers that a layer of torch writes.
    """
    written = called.written if isinstance(called, OpaqueModule) else ()
    own = 2 if runs_python(called) or has_own_python(called) else 1
    pairs = [(one, own) for one in (*called.buffers(), *written)] + [(one, 2) for one in called.parameters()]
    return {storage_key(one): n for one, n in pairs if one.layout is torch.strided}


def _held_key(module: fx.GraphModule, node: fx.Node) -> int:
    held = _attribute(module, node)
    return storage_key(held) if isinstance(held, torch.Tensor) and held.layout is torch.strided else 0


def _attribute(module: fx.GraphModule, node: fx.Node) -> Any:
    """Return the attribute that a node names."""
    *parents, name = str(node.target).split(".")
    return getattr(module.get_submodule(".".join(parents)), name)


def _sources(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> tuple[RandomSource, ...]:
    """Return the sources that a stage may draw from beside the generator of its device."""
    called = [one for one in _called_modules(module, nodes) if runs_python(one)]
    hooks = [hook for one in called for table in forward_hooks_of(one) for hook in table.values()]
    generators = [*drawn_generators(module, nodes), *(found for hook in hooks for found in generators_near(hook))]
    return tuple((random_sources if called else generator_sources)(generators))


def called_modules(stage: Stage) -> list[nn.Module]:
    """Return the layers and pieces that a stage calls."""
    return _called_modules(stage.module, list(stage.module.graph.nodes))


def _called_modules(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> list[nn.Module]:
    return [module.get_submodule(str(node.target)) for node in nodes if node.op == "call_module"]


def _hooks_backward(module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether the backward of a node may run user code."""
    if facts(node).region is not None:
        return True
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        return runs_python(called) or any(backward_hooks_of(called))
    if node.op == "call_method":
        return "hook" in str(node.target)
    is_users = isinstance(node.target, FunctionType) and not is_foreign(node.target)
    return is_users or hasattr(node.target, "autograd_function")
