"""Values that a loss or a backward may read, and that stages on other ranks leave on objects: on its rank they are not there.

rank 0      F0 leaves layers[0].aux, on its own copy of the model
rank 1      loss reads layers[0].aux: None, or that of a call before

Tensors in attributes are sent to the last stage, which leaves them there (`graph/left_for_loss.py`). Of the rest a warning tells.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from pipecompile.driver.backend import Backend
from pipecompile.driver.specialization import Specialization
from pipecompile.errors import RecordingWarning
from pipecompile.graph.left_for_loss import sendable, sent_to_loss
from pipecompile.graph.stages import Stage
from pipecompile.ir.plan import Plan
from pipecompile.options import Options
from pipecompile.runtime.cells.side_effects import SideEffects
from pipecompile.tracing.emit.call_objects import HeldObject, remade
from pipecompile.tracing.emit.closures import rebuilt
from pipecompile.tracing.loaded_names import attribute_names
from pipecompile.tracing.state.effect_places import EffectPlace
from pipecompile.tracing.state.function_state import places_near, reads_objects, roots_near
from pipecompile.tracing.state.hidden_containers import identity
from pipecompile.tracing.state.loss_bindings import named_by_loss
from pipecompile.tracing.state.snapshot import held_values
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.tracing.user_source import warn

__all__ = ["warn_of_ranks", "with_left_for_loss"]


def with_left_for_loss(
    graph: TracedGraph, stage_of: Mapping[str, int], plan: Plan, options: Options, backend: Backend
) -> Mapping[str, int]:
    """Return the stages of nodes, with those that leave for the loss what stages on other ranks leave, if the loss may read it."""
    last, found = plan.placement[-1], [] if backend.holds_model else sendable(graph)
    away = [node for node in found if plan.placement[stage_of[node.name]] != last]
    loss, read = options.loss_fn, list[str]()
    if not away:
        return stage_of
    if loss is not None and reads_objects(loss):
        near, names = _containers(loss), named_by_loss(loss)
        read = [node.name for node in away if _is_read(node.target.place, near, names)]  # type: ignore[union-attr]
    all_read = backend.united(read)
    return sent_to_loss(graph, stage_of, plan.n_stages - 1, [node for node in away if node.name in all_read])


def warn_of_ranks(specialization: Specialization) -> None:
    """Warn if the loss, or a backward, may read what a stage on another rank leaves on objects."""
    loss, placement = specialization.options.loss_fn, specialization.plan.placement
    effects = [SideEffects.of(stage) for stage in specialization.stages]
    away = [stage for stage, device in enumerate(placement) if device != placement[-1]]
    if away and loss is not None and reads_objects(loss):
        near, names = _containers(loss), named_by_loss(loss)
        sent = {(id(one.container), one.key) for one in effects[-1].places}
        found = [(stage, name) for stage in away for name in _read(effects[stage], near, names, sent)]
        if found:
            warn(_ELSEWHERE.format(*found[0]), RecordingWarning)
    _warn_of_objects(specialization)
    for stage in specialization.stages:
        named = _named_by_hooks(stage) if effects[stage.index].hooks_backward else frozenset[str]()
        others = [other for other, device in enumerate(placement) if device != placement[stage.index]]
        read = [
            (other, name) for other in others for place in effects[other].places for name in named & {*_names(place)}
        ]
        if read:
            warn(_BY_BACKWARD.format(stage.index, *read[0]), RecordingWarning)
            return


_ELSEWHERE = (
    "stage {}, on another rank than the loss, leaves {} on objects that the loss reads: on the rank of the loss it is not there, or is that "
    "of a call before. Return it from forward, where the loss finds it with its gradient"
)
_OBJECTS = (
    "functions of {} and of {} hold an object that the model's forward makes, and are on different ranks: what one leaves in it, the other does"
    " not find. Try a cut that leaves both in one stage, with split_before="
)
_BY_BACKWARD = (
    "a hook or an autograd function of stage {} names an attribute that stage {}, on another rank, leaves: {!r}. On the rank of the hook it "
    "is not there, or is that of a call before. Try a cut that leaves both in one stage, with split_before="
)


def _warn_of_objects(specialization: Specialization) -> None:
    """Warn if functions of stages on several ranks hold one object that each call makes: each rank has a copy of its own."""
    first: dict[int, tuple[int, str]] = {}
    for stage in specialization.stages:
        device = specialization.plan.placement[stage.index]
        for node in stage.module.graph.nodes:
            if node.target is remade:
                objects, held = (getattr(stage.module, str(one.target)) for one in node.args[:2])
                for key in objects.shared_by(held):
                    other, where = first.setdefault(key, (device, held.where))
                    if other != device:
                        warn(_OBJECTS.format(where, held.where), RecordingWarning)
                        return


def _named_by_hooks(stage: Stage) -> frozenset[str]:
    """Return the names in the code of the hooks on tensors and the autograd functions of a stage."""
    module, found = stage.module, set[str]()
    for node in module.graph.nodes:
        is_hooking = (node.op == "call_method" and "hook" in str(node.target)) or node.target in (rebuilt, remade)
        hooks = [one for one in node.all_input_nodes if one.op == "get_attr"] if is_hooking else []
        values = [getattr(module, str(one.target), None) for one in hooks]
        functions = [one.value if isinstance(one, HeldObject) else one for one in values]
        functions.append(getattr(getattr(node.target, "autograd_function", None), "backward", None))
        for function in functions:
            code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
            found |= attribute_names(code) if code is not None else set()
    return frozenset(found)


def _containers(loss: Callable[..., Any]) -> set[int]:
    """Return the ids of the containers that a loss reaches, those of all layers of its models among them."""
    roots = roots_near(loss)
    places = places_near(loss, roots)
    models = [one for one in (loss, *roots, *held_values(places)) if isinstance(one, nn.Module)]
    layers = (layer for model in models for layer in model.modules())
    return {identity(place.container) for place in places} | {id(vars(layer)) for layer in layers}


def _read(effects: SideEffects, near: set[int], names: frozenset[str], sent: set[tuple[int, object]]) -> Iterator[str]:
    """Yield phrases for what a stage leaves where the loss reaches, by names in code of the loss, but for what the last stage leaves too."""
    for place in effects.places:
        if (id(place.container), place.key) in sent:
            continue
        if _is_read(place, near, names):
            yield repr(leading[-1]) if (leading := _names(place)) else "something"
    if effects.runs_python and any(identity(one) in near for one, _ in effects.state_holders.contents()):
        yield "what its hooks and pieces kept whole leave"


def _is_read(place: EffectPlace, near: set[int], names: frozenset[str]) -> bool:
    """Return whether a loss that reaches these containers, by these names, may read a place."""
    leading = _names(place)
    is_reached = not near.isdisjoint((identity(place.container), id(place.route.start)))
    return is_reached and (not leading or bool(names.intersection(leading)))


def _names(place: EffectPlace) -> list[str]:
    return [one for one in (*place.route.names, place.key) if isinstance(one, str)]
