"""The function of a stage: its layers called without the overhead of `nn.Module.__call__` and `__getattr__`; the loss behind the last.

    stage.module.forward    self.layer ─► nn.Module.__getattr__ ─► layer     layer(x) ─► any hooks? ─► layer.forward(x)
    the same code, here     self.layer ──────────────────────────────────────────────► layer.forward(x)

The code that fx generated for a stage runs with another `self`, whose children are plain attributes, which Python finds first.
Before each run every layer is checked for hooks, and a layer without hooks is called by its forward. For small layers that saves a
fifth of their time (benchmarks/overhead.py). All other attributes are the stage module's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import fx, nn

from pipecompile.batching.containers import with_tensors
from pipecompile.errors import InputError
from pipecompile.graph.stages import Stage
from pipecompile.ir import TARGET
from pipecompile.runtime.cells.forward_backward import Function
from pipecompile.runtime.cells.loss_arguments import loss_places, received, require_apart, versions
from pipecompile.runtime.cells.loss_draws import LossDraws
from pipecompile.runtime.cells.loss_gradients import LossGradients
from pipecompile.runtime.cells.loss_writes import LossWrites
from pipecompile.runtime.results import Outputs, own_loss
from pipecompile.text.shown_value import type_text
from pipecompile.torch_private.dtensors import whole_of
from pipecompile.torch_private.modules import has_any_global_hook, hook_tables_of, is_compiled
from pipecompile.tracing.state.change_log import writes_noted

__all__ = ["LOSS_NOTE", "LossCode", "StageCode", "loss_function", "with_loss"]


@dataclass(frozen=True, slots=True)
class StageCode:
    """The function of a stage. `layers` are (attributes that hold the layer, its name there, the layer)."""

    run: Callable[..., Any]
    layers: tuple[tuple[dict[str, Any], str, nn.Module], ...] = ()

    @classmethod
    def of(cls, stage: fx.GraphModule) -> StageCode:
        """Return the code of a stage. The stage must not be rewritten later."""
        nodes = [node for node in stage.graph.nodes if node.op in ("call_module", "get_attr")]
        called = {str(node.target) for node in nodes if node.op == "call_module"}
        entered = {parent for node in nodes for parent in _parents(str(node.target))}
        layers: list[tuple[dict[str, Any], str, nn.Module]] = []
        children = _direct_children(stage, "", called - entered, layers)
        return cls(MethodType(type(stage).forward, children), tuple(layers))

    def refresh(self) -> None:
        """Bind each layer's `forward` if the layer has no hooks, else the layer. Run before every step: hooks may have changed."""
        has_global_hook = has_any_global_hook()
        for attributes, name, layer in self.layers:
            is_plain = not (has_global_hook or any(hook_tables_of(layer)) or is_compiled(layer))
            attributes[name] = layer.forward if is_plain else layer

    def for_slot(self, slot: int | None, *, stays: bool = True) -> Callable[..., Any]:  # noqa: ARG002 one function serves all slots
        """Return the function."""
        return self.run


def _parents(target: str) -> Iterator[str]:
    """Yield the modules on the way to a target: of `a.b.c` these are `a` and `a.b`."""
    return (target[:place] for place, letter in enumerate(target) if letter == ".")


def _direct_children(
    module: nn.Module, path: str, called: set[str], layers: list[tuple[dict[str, Any], str, nn.Module]]
) -> _Children:
    """Return the children of a stage, or of an empty module that leads to others, as plain attributes."""
    children = _Children(module)
    for name, child in module.named_children():
        is_empty = type(child) is nn.Module
        children.__dict__[name] = _direct_children(child, f"{path}{name}.", called, layers) if is_empty else child
        if path + name in called and type(child).__call__ is nn.Module.__call__:
            layers.append((children.__dict__, name, child))
    return children


class _Children:
    """Stand-in for a module: attributes that are not set here are the module's."""

    def __init__(self, module: nn.Module) -> None:
        self.__dict__["(module)"] = module  # no name that a child can have

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["(module)"], name)


# -- the loss ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LossCode:
    """Code of the last stage, followed by the loss."""

    stage: StageCode
    function: Function

    def refresh(self) -> None:
        """Refresh the stage."""
        self.stage.refresh()

    def for_slot(self, slot: int | None, *, stays: bool = True) -> Function:  # noqa: ARG002 one function serves all slots
        """Return the function."""
        return self.function


LOSS_NOTE = "the loss was called with"
"""Beginning of the note that is added to an error of a loss function."""


def with_loss(
    stage: Stage,
    run: Function,
    inputs: tuple[str, ...],
    outputs: Outputs,
    loss_fn: Callable[..., Any] | None,
    *,
    has_aux: bool,
    draws: LossDraws | None = None,
    writes: LossWrites | None = None,
    gradients: LossGradients | None = None,
) -> Function:
    """Return a function of the cell's inputs and the number of samples that gives the loss, and the auxiliary value if any."""
    losses = loss_function(loss_fn, has_aux=has_aux)
    if draws is not None and writes is not None:
        losses = _first_call_watched(losses, draws, writes)
    position = {name: place for place, name in enumerate(inputs)}
    stage_inputs = [position[name] for name in stage.inputs]
    target = position.get(TARGET)
    earlier = [place for place in loss_places(stage, inputs, outputs.names) if place != target]

    def function(*values: Any) -> Sequence[Any]:
        *given, size = values
        loss_of = losses if gradients is None else gradients.watched(losses, values, given)
        for place in earlier:
            given[place] = received(given[place])
        arguments = [given[place] for place in stage_inputs]
        results = run(*arguments, size) if stage.sized else run(*arguments)
        made = dict(zip(stage.outputs, results, strict=True))
        output = outputs.assemble(lambda name: made[name] if name in made else given[position[name]], size)
        passed = [given[place] for place in earlier]
        before = versions(passed)
        result = loss_of(output) if target is None else loss_of(output, given[target])
        require_apart(passed, before)
        return result

    return function


def _first_call_watched(losses: Function, draws: LossDraws, writes: LossWrites) -> Function:
    """Return the function that computes losses, watched until a call has ended."""
    watched: Function | None = writes.watched(draws.watched(losses))

    def function(*arguments: Any) -> Any:
        nonlocal watched
        if watched is None:
            return losses(*arguments)
        result = watched(*arguments)
        watched = None
        return result

    return function


def loss_function(loss_fn: Callable[..., Any] | None, *, has_aux: bool) -> Function:
    """Return a function of output and target that gives (loss,), or (loss, aux) with `aux` detached. Without `loss_fn` the
    loss is the model's own.
    """
    if not has_aux:
        loss_of, hint = (loss_fn, _MEAN) if loss_fn else ((lambda output, *_: own_loss(output)), _OWN_MEAN)
        return lambda *arguments: (_scalar(_called(loss_of, arguments), hint),)
    assert loss_fn is not None

    def with_aux(*arguments: Any) -> Sequence[Any]:
        pair = _called(loss_fn, arguments)
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise InputError(
                f"loss_fn returned {type_text(pair)}",
                why="has_aux=True expects a pair",
                hint="return (loss, aux) from loss_fn",
            )
        loss, aux = pair
        return _scalar(loss), with_tensors(aux, torch.Tensor.detach)

    return with_aux


def _called(loss_fn: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Return the result of the loss function. If it raises, a note on its error describes its arguments."""
    try:
        with writes_noted(loss_fn):
            return loss_fn(*arguments)
    except Exception as error:
        error.add_note(f"{LOSS_NOTE} ({', '.join(map(_described, arguments))})")
        raise


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type_text(value)


_MEAN = "loss_fn(output, target) must return the mean over its samples"
_OWN_MEAN = "compile(..., loss_fn=lambda output: output.loss.mean()), or a model that returns the mean over its samples"


def _scalar(loss: Any, hint: str = _MEAN) -> torch.Tensor:
    """Return the loss as a plain tensor without dimensions. Raise InputError if it has not exactly one element.

    Under `loss_parallel` of torch it is a DTensor, into whose backward no plain gradient goes.
    """
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        whole = whole_of(loss)
        return whole if whole.dim() == 0 else whole.reshape(())
    is_tensor = isinstance(loss, torch.Tensor)
    what = f"a tensor of shape {tuple(loss.shape)}" if is_tensor else type_text(loss)
    if isinstance(loss, tuple):
        hint += "; compile(..., has_aux=True) if it returns (loss, aux)"
    raise InputError(f"the loss is {what}, not a scalar", hint=hint)
