"""One run of a model or of its recording on real values, observed and then undone: outputs, loss, gradients, buffers, draws.

A run leaves no trace: inputs are copies, gradients are returned instead of accumulated, and the contents of tensors, the
attributes of the model and of the loss, and the states of generators are restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipecompile.batching.call_inputs import FlatInputs
from pipecompile.batching.containers import flatten_containers
from pipecompile.batching.input_layouts import copy_of
from pipecompile.errors import text_of
from pipecompile.torch_private import pytree
from pipecompile.torch_private.autograd_engine import gradient_hook_tables, unhooked
from pipecompile.torch_private.modules import parametrizations_uncached
from pipecompile.torch_private.storages import storage_key
from pipecompile.tracing.ambient_modes import contained
from pipecompile.tracing.reachable_code import reachable
from pipecompile.tracing.state.filled_arguments import objects_restored
from pipecompile.tracing.state.function_state import function_restored, globals_restored
from pipecompile.tracing.state.muted_output import output_muted
from pipecompile.tracing.state.random_states import (
    RandomStates,
    generator_sources,
    generators_among,
    random_sources,
    random_states_restored,
)
from pipecompile.tracing.state.snapshot import Place, contents_restored, held_values, model_restored, places_of
from pipecompile.tracing.state.tensor_contents import tensors_restored

__all__ = ["GRADIENT", "CheckedCall", "Observation", "observe", "random_states_of", "undone"]

GRADIENT = "gradient of "
"""The beginning of the name of a gradient in an observation."""

_FREED = "backward through the graph a second time"
"""Part of the message of autograd about a graph that an earlier backward has freed."""


_Differentiate = Callable[["CheckedCall", list[Any], list[Any]], Mapping[str, Any]]
"""(call, results, leaves of the inputs) to gradients by name."""


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """One micro-batch of a call: the model, its flat inputs, the device that both are on, and the loss of an output.

    `loss_of` returns None if the call has no loss; gradients are then those of a weighted sum of the outputs.
    """

    model: nn.Module
    inputs: FlatInputs
    device: torch.device
    with_grad: bool
    loss_of: Callable[[Any], torch.Tensor | None]
    loss_fn: Any = None

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
        """Return copies of the arguments, and the copies of their leaves."""
        leaves = [_copied(leaf, self.device) for leaf in self.inputs.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.inputs.spec)
        return args, kwargs, leaves


@dataclass(slots=True)
class Observation:
    """The results of one run and what it left: values by name, and the structure of the output.

    `drawn` names the generators that the run drew from, `ends` has the states of all generators at its end.
    """

    values: dict[str, Any]
    structure: Any
    drawn: tuple[str, ...]
    ends: RandomStates


@contextmanager
def undone(call: CheckedCall) -> Iterator[None]:
    """Restore the model, the loss and the generators of random numbers when the block ends.

    Hooks that get the gradients of parameters do not run inside the block, and what it prints is dropped.
    """
    loss_modules = [call.loss_fn] if isinstance(call.loss_fn, nn.Module) else []
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(contained())
        stack.enter_context(parametrizations_uncached())
        stack.enter_context(unhooked())
        stack.enter_context(output_muted())
        for module in (call.model, *loss_modules):
            stack.enter_context(model_restored(module))
        stack.enter_context(tensors_restored(call.model))
        stack.enter_context(globals_restored(call.model))
        generators = generator_sources(generators_among(call.inputs.leaves))
        stack.enter_context(random_states_restored(generators))
        if call.loss_fn is not None:
            stack.enter_context(function_restored(call.loss_fn))
        for table in (table for tensor in call.model.parameters() for table in gradient_hook_tables(tensor)):
            stack.enter_context(contents_restored([Place(table, "")]))
            table.clear()
        yield


def random_states_of(call: CheckedCall) -> RandomStates:
    """Return the present states of all generators that the model may draw from."""
    values = (*call.inputs.leaves, *held_values(places_of(call.model)), *reachable(call.model).objects)
    return RandomStates(random_sources(generators_among(values), [call.device]))


def observe(function: Callable[..., Any], call: CheckedCall, start: RandomStates) -> Observation:
    """Run `function`, the model or its recording, from these states of the generators, and return what was observed."""
    try:
        return _observed(function, call, start, _gradients)
    except RuntimeError as error:
        if "use_reentrant" not in text_of(error):
            raise
    return _observed(function, call, start, _accumulated_gradients)  # reentrant checkpoints forbid torch.autograd.grad


def _observed(
    function: Callable[..., Any], call: CheckedCall, start: RandomStates, gradients_of: _Differentiate
) -> Observation:
    args, kwargs, leaves = call.arguments()
    with undone(call), torch.inference_mode(False), torch.set_grad_enabled(call.with_grad):
        start.restore()
        with objects_restored(call.inputs.leaves):
            output = function(*args, **kwargs)
            flat, structure = flatten_containers(output)
        owned = {storage_key(t) for t in (*call.model.parameters(), *call.model.buffers()) if t.layout is torch.strided}
        values = {f"output {index}": _kept(value, owned) for index, value in enumerate(flat)}
        values |= {
            f"output {index}.requires_grad": getattr(value, "requires_grad", False) for index, value in enumerate(flat)
        }
        loss = call.loss_of(output)
        if loss is not None:
            values["loss"] = loss.detach()
        values |= gradients_of(call, flat if loss is None else [loss], leaves)
        values |= {f"buffer {name}": buffer.clone() for name, buffer in call.model.named_buffers()}
        return Observation(values, structure, start.changed(), RandomStates(start.sources))


def _copied(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return copy_of(leaf).to(device).requires_grad_(leaf.requires_grad)


def _kept(value: Any, owned: set[int]) -> Any:
    """Return the value of an output; a copy of it if it shares memory with the model, whose contents are restored."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    return value.detach().clone() if storage_key(value) in owned else value.detach()


def _gradients(call: CheckedCall, results: list[Any], leaves: list[Any]) -> Mapping[str, Any]:
    """Return the gradients of parameters and inputs by name; of outputs that are not loss, the sum with fixed weights is taken.

    No gradient is accumulated, so hooks of `.grad` do not run. A forward that differentiates may have freed the graph of its outputs:
    the outputs have no gradients then, in the model as in its recording, and the other values are still compared.
    """
    roots, weights, wanted = _roots(call, results, leaves)
    if not wanted:
        return {}
    try:
        found = torch.autograd.grad(roots, list(wanted.values()), weights, allow_unused=True)
    except RuntimeError as error:
        if _FREED not in text_of(error):
            raise
        return {GRADIENT + "the outputs": "freed by the forward"}
    return dict(zip(wanted, found, strict=True))


def _accumulated_gradients(call: CheckedCall, results: list[Any], leaves: list[Any]) -> Mapping[str, Any]:
    """Return the gradients by name, accumulated in `.grad`, which is restored afterwards."""
    roots, weights, wanted = _roots(call, results, leaves)
    for tensor in wanted.values():
        tensor.grad = None
    if wanted:
        torch.autograd.backward(roots, weights)
    return {name: tensor.grad for name, tensor in wanted.items()}


def _roots(
    call: CheckedCall, results: list[Any], leaves: list[Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None, dict[str, torch.Tensor]]:
    """Return what is differentiated, the weights of its entries, and by name the tensors that get gradients."""
    roots = [value for value in results if isinstance(value, torch.Tensor) and value.requires_grad]
    named: dict[str, torch.Tensor] = dict(call.model.named_parameters())
    named |= {
        name: leaf for name, leaf in zip(call.inputs.names, leaves, strict=True) if isinstance(leaf, torch.Tensor)
    }
    wanted = {GRADIENT + name: tensor for name, tensor in named.items() if tensor.requires_grad}
    weights = None if len(roots) == 1 and roots[0].numel() == 1 else [_weights(root) for root in roots]
    return roots, weights, wanted if call.with_grad and roots else {}


def _weights(root: torch.Tensor) -> torch.Tensor:
    """Return fixed weights between 0.5 and 1.5, so that no two entries of an output cancel."""
    steps = torch.arange(root.numel(), device=root.device).remainder(17)
    return (0.5 + steps / 17).to(root.dtype).reshape(root.shape)
