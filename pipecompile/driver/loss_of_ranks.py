"""Values that a loss may read, and that stages on other ranks leave on objects: on the rank of the loss they are not there.

rank 0      F0 leaves layers[0].aux, on its own copy of the model
rank 1      loss reads layers[0].aux: None, or that of a call before
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from pipecompile.driver.specialization import Specialization
from pipecompile.errors import RecordingWarning
from pipecompile.runtime.cells.side_effects import SideEffects
from pipecompile.tracing.state.function_state import places_near, reads_objects, roots_near
from pipecompile.tracing.state.hidden_containers import identity
from pipecompile.tracing.state.loss_bindings import named_by_loss
from pipecompile.tracing.state.snapshot import held_values
from pipecompile.tracing.user_source import warn

__all__ = ["warn_of_ranks"]


def warn_of_ranks(specialization: Specialization) -> None:
    """Warn if the loss may read what a stage on another rank leaves on objects."""
    loss, placement = specialization.options.loss_fn, specialization.plan.placement
    away = [stage for stage in specialization.stages if placement[stage.index] != placement[-1]]
    if not away or loss is None or not reads_objects(loss):
        return
    near, names = _containers(loss), named_by_loss(loss)
    found = ((stage.index, name) for stage in away for name in _read(SideEffects.of(stage), near, names))
    if (first := next(found, None)) is not None:
        warn(_ELSEWHERE.format(*first), RecordingWarning)


_ELSEWHERE = (
    "stage {}, on another rank than the loss, leaves {} on objects that the loss reads: on the rank of the loss it is not there, or is that "
    "of a call before. Return it from forward, where the loss finds it with its gradient"
)


def _containers(loss: Callable[..., Any]) -> set[int]:
    """Return the ids of the containers that a loss reaches, those of all layers of its models among them."""
    roots = roots_near(loss)
    places = places_near(loss, roots)
    models = [one for one in (loss, *roots, *held_values(places)) if isinstance(one, nn.Module)]
    layers = (layer for model in models for layer in model.modules())
    return {identity(place.container) for place in places} | {id(vars(layer)) for layer in layers}


def _read(effects: SideEffects, near: set[int], names: frozenset[str]) -> Iterator[str]:
    """Yield phrases for what a stage leaves where the loss reaches, by names in code of the loss."""
    for place in effects.places:
        leading = [one for one in (*place.route.names, place.key) if isinstance(one, str)]
        is_reached = not near.isdisjoint((identity(place.container), id(place.route.start)))
        if is_reached and (not leading or names.intersection(leading)):
            yield repr(leading[-1]) if leading else "something"
    if effects.runs_python and any(identity(one) in near for one, _ in effects.state_holders.contents()):
        yield "what its hooks and pieces kept whole leave"
