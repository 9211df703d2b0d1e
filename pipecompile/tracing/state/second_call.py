"""A second call of the model, in the state that the first call left, to decide how a graph can reproduce that state.

The second call is recorded behind the first, compared with it, and erased again. Three outcomes:

    same nodes, same changes      each change becomes a node (`effect_nodes.effect_function`), or warns if none can make it
    other nodes, changes, results CarriedStateError: the model reads what the call before left
    the second call raises        CarriedStateError
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import fx, nn

from pipecompile.batching.call_inputs import FlatInputs
from pipecompile.errors import TraceError
from pipecompile.torch_private import pytree
from pipecompile.torch_private.modules import forwards_of
from pipecompile.tracing.emit.node_writer import Regions
from pipecompile.tracing.emit.value_nodes import ValueNodes, tensors_in
from pipecompile.tracing.fakes.lifted_numbers import LiftedNumber, examples
from pipecompile.tracing.model_pieces import Piece
from pipecompile.tracing.node_facts import Role, facts
from pipecompile.tracing.state.call_comparison import constant_nodes, recorded_alike
from pipecompile.tracing.state.carried_state import CarriedState, carried_keys, has_batch_size, is_fixed_buffer
from pipecompile.tracing.state.counters import adds_a_constant, counters_watched, warn_of_decisions
from pipecompile.tracing.state.effect_nodes import effect_function, in_turn
from pipecompile.tracing.state.left_values import left_alike
from pipecompile.tracing.state.leftover_state import (
    StateChange,
    StateWatch,
    change_keys,
    settled,
    with_whole_lists,
)
from pipecompile.tracing.state.made_tables import is_note, made_tables
from pipecompile.tracing.state.recording_leftovers import RecordingLeftovers, warn_of_lost, warn_of_repetitions
from pipecompile.tracing.state.returned_values import note_returned
from pipecompile.tracing.state.snapshot import contents_restored, places_of

__all__ = ["CarriedStateError", "RecordedCall", "record_state_changes"]


class CarriedStateError(TraceError):
    """A call depends on what the call before left. `pieces`, the smallest first, may be opaque instead; or a graph may write what is
    at the keys `carried`, or if `can_be_single`, serve one call. `has_batch_size`: what is left there has the size of the batch.
    `is_fixed_buffer`: it is a buffer that a graph for this batch size alone writes in place.
    """

    def __init__(self, changes: Sequence[StateChange], model: nn.Module) -> None:
        owners = sorted({change.place.owner for change in changes} - {""}, key=lambda path: -path.count("."))
        self.pieces = [Piece(path) for path in owners]
        self.carried, self.has_batch_size = carried_keys(changes), any(map(has_batch_size, changes))
        self.is_fixed_buffer = any(map(is_fixed_buffer, changes))
        self.can_be_single = any(one.tensors for one in changes) and not any(one.is_removal for one in changes)
        names = ", ".join(dict.fromkeys(change.name for change in changes))
        code = next((one.__code__ for one in forwards_of(model) if hasattr(one, "__code__")), None)
        where = f"{code.co_filename}:{code.co_firstlineno} in {code.co_qualname}" if code else ""
        super().__init__(code="PC114", where=where, why=f"the call changes {names}, and the next call depends on it")


class RecordedCall(Protocol):
    """The recording of the first call, as far as the second call needs it."""

    model: nn.Module
    values: ValueNodes
    regions: Regions
    leftovers: RecordingLeftovers

    @property
    def carried(self) -> CarriedState:
        """The state that calls carry on, as earlier recordings have shown."""

    def twin(self, leaf: Any, dim: Any) -> Any:
        """Return the fake twin of an input leaf with batch dimension `dim`."""

    def paused(self) -> AbstractContextManager[None]:
        """Record nothing inside the block."""

    def call_counts_restored(self) -> AbstractContextManager[None]:
        """Count the calls of opaque pieces inside the block from 0 again, and forget them afterwards."""

    def write_effect(self, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Record a node that calls `function`, which returns nothing."""


def record_state_changes(recording: RecordedCall, inputs: FlatInputs, output: Any, changes: list[StateChange]) -> Any:
    """Record nodes for the `changes` that the first call left on the model. Return the `output` of that call, with copies of its
    containers, which may be the model's own.

    Raise CarriedStateError if the second call is recorded otherwise than the first, and warn about changes that no node
    can make.
    """
    hooks, output = recording.leftovers.of_hooks, settled(output)
    hooks.check(changes)
    changes = recording.carried.divided(changes, recording.model)
    if recording.carried.is_single:
        _record_single(recording, changes)
    elif changes or hooks.has_items:
        _compare_calls(recording, inputs, output, changes)
    return output


def _record_single(recording: RecordedCall, changes: Sequence[StateChange]) -> None:
    """Record nodes for the `changes` of a call, of which the next call is another recording. Guards see what these nodes leave."""
    recording.regions.close()
    of_pieces = recording.leftovers.of_pieces(changes)
    for change in [one.settled() for one in changes if not any(one is other for other in of_pieces)]:
        is_advanced = change.is_number and change.before is not None
        after = 2 * change.value - change.before if is_advanced else None
        effect = effect_function(change, after, recording.model.get_submodule(change.place.owner))
        value = recording.values.with_fakes(change.value)
        if effect is None or not all(map(recording.values.has_node_for, tensors_in(value))):
            raise CarriedStateError(changes, recording.model)
        _write(recording, change, effect, value)


def _compare_calls(recording: RecordedCall, inputs: FlatInputs, output: Any, changes: list[StateChange]) -> None:
    """Record a second call, and nodes for the `changes` of the first, if both are recorded alike."""
    recording.regions.close()
    model, values = recording.model, recording.values
    returned, first = note_returned(values, output), _computing_nodes(values.graph)
    if recording.leftovers.is_length_read(changes):
        raise CarriedStateError(changes, model)
    of_pieces = recording.leftovers.of_pieces(changes)
    kept = [one.settled() for one in changes if not any(one is other for other in of_pieces)]
    try:
        later = _later_changes(recording, inputs, changes, first)
    except Exception as error:
        raise CarriedStateError(changes, model) from error
    second = [node for node in _computing_nodes(values.graph) if node not in set(first)]
    constants = constant_nodes(first, training=model.training)
    kept, later = with_whole_lists(kept, later)
    is_alike = recorded_alike(first, second, constants) and left_alike(kept, later, values, first, constants)
    is_alike &= _is_left_at_same_places([*kept, *of_pieces], later, values, constants)
    _erase_second_call(values.graph, set(first) - {returned})
    if not is_alike:
        recording.leftovers.of_hooks.check(changes)
        raise CarriedStateError(changes, model)
    for change in of_pieces:
        recording.leftovers.note_written(change)
    warn_of_lost([change.name for change in _record_changes(kept, later, constants, recording)], model)
    made_again = [change for change in changes if not change.is_first_number or any(map(change.is_at, later))]
    warn_of_repetitions(made_again, first, model)


def _later_changes(
    recording: RecordedCall, inputs: FlatInputs, changes: Sequence[StateChange], first: Sequence[fx.Node]
) -> list[StateChange]:
    """Return the changes of a second call. If the first advanced counters, Python's decisions on them are looked for.

    A call that does not run with stand-ins for the counters is recorded with the numbers.
    """
    model, graph = recording.model, recording.values.graph
    kept = change_keys([change for change in changes if change.is_buffer])
    decisions = recording.values.symbol.guards()
    counters = [change for change in changes if change.is_count]
    if firsts := [change for change in changes if change.is_first_number]:
        with contents_restored(places_of(model)):
            again = _record_again(recording, inputs, kept)
        counters += [one for one in firsts if any(map(one.is_at, again))]
        _erase_second_call(graph, set(first))
    if not counters:
        return _undecided(_record_again(recording, inputs, kept), decisions, recording)
    later: list[StateChange] | None = None
    with contents_restored(places_of(model)), counters_watched(counters) as comparisons, suppress(Exception):
        later = _record_again(recording, inputs, kept)
    if later is None:
        _erase_second_call(graph, set(first))
        return _record_again(recording, inputs, kept)
    if not all(adds_a_constant(one.value) for one in later):
        raise CarriedStateError(changes, model)
    advanced = [one.value for one in later if isinstance(one.value, LiftedNumber)]
    warn_of_decisions(comparisons, advanced, model)  # a length that only grows is not a counter
    return _undecided([replace(one, value=examples(one.value)) for one in later], decisions, recording)


def _undecided(later: list[StateChange], decisions: Sequence[Any], recording: RecordedCall) -> list[StateChange]:
    """Return the changes of a second call. If Python has decided on more sizes than in the first, sums of sizes are not counters."""
    if recording.values.symbol.guards() == decisions:
        return later
    is_size = [isinstance(one.value, (torch.SymInt, torch.SymFloat)) for one in later]
    return [replace(one, value=_DECIDED) if size else one for one, size in zip(later, is_size, strict=True)]


def _record_again(recording: RecordedCall, inputs: FlatInputs, kept: set[tuple[int, Any]]) -> list[StateChange]:
    """Record a second call on new fake inputs, bound to the same placeholders, and return its changes.

    Its buffers are those that the first call began with, but for those that the first call has replaced by another shape.
    """
    placeholders = [node for node in recording.values.graph.nodes if node.op == "placeholder"]
    with recording.paused():
        leaves = [recording.twin(leaf, dim) for leaf, dim in zip(inputs.leaves, inputs.dims, strict=True)]
    for twin, node in zip(leaves, placeholders, strict=True):
        if isinstance(twin, torch.Tensor):
            recording.values.bind(twin, node)
    args, kwargs = pytree.tree_unflatten(leaves, inputs.spec)
    with recording.values.original_buffers(), recording.carried.put_back(), recording.call_counts_restored():
        since = StateWatch(recording.model, kept=kept)
        output = recording.model(*args, **kwargs)
        recording.regions.close()
        note_returned(recording.values, output)
        return recording.carried.without(recording.leftovers.changes(since))


def _is_left_at_same_places(
    changes: Sequence[StateChange], later: Sequence[StateChange], values: ValueNodes, constants: set[fx.Node]
) -> bool:
    """Return whether two calls leave tensors at the same places, but for tables, which the second need not make again."""
    tables = _tensor_keys([change for change in changes if _is_constant(change, values, constants)])
    return _tensor_keys(changes) - tables == _tensor_keys(later) - tables


def _tensor_keys(changes: Sequence[StateChange]) -> set[tuple[int, Any, int]]:
    """Return (container, key, number of items appended) of the changes that leave tensors."""
    return {
        (id(change.place.container), change.key, len(change.value) if change.key is None else 0)
        for change in changes
        if change.tensors
    }


def _is_constant(change: StateChange, values: ValueNodes, constants: set[fx.Node]) -> bool:
    """Return whether only constants are left: a table that every run may make anew."""
    return all(values.has_node_for(tensor) and values.node(tensor) in constants for tensor in change.tensors)


def _computing_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the calls, without sizes and without switches of grad mode and autocast."""
    called = ("call_function", "call_method", "call_module")
    return [node for node in graph.nodes if node.op in called and facts(node).role is Role.VALUE]


def _erase_second_call(graph: fx.Graph, first: set[fx.Node]) -> None:
    """Erase every node behind the first call, except sizes."""
    last = max((index for index, node in enumerate(graph.nodes) if node in first), default=-1)
    for node in reversed(list(graph.nodes)[last + 1 :]):
        if not node.users and node.op not in ("placeholder", "get_attr") and not facts(node).is_size:
            graph.erase_node(node)


_DECIDED = object()
"""Stands for a number that Python decides on."""

_MADE_ANYWAY: Any = object()
"""The effect of a change that every run of the graph makes."""


def _record_changes(
    changes: Sequence[StateChange], later: Sequence[StateChange], constants: set[fx.Node], recording: RecordedCall
) -> list[StateChange]:
    """Record a node for each change that a run does not make anyway, and return the changes that no node makes.

    Flags go with the others: a model that installs hooks, or makes a table, and notes that they are there must not have the note alone.
    """
    effects = [(change, _effect(change, later, recording, constants)) for change in changes]
    once = [change for change, effect in effects if effect is _MADE_ANYWAY]
    owners = {change.place.owner for change in once}
    notes = [one for one, _ in effects if one.place.owner in owners and is_note(one, later)]
    effects = [one for one in effects if not any(one[0] is note for note in notes)]
    recording.leftovers.tables = made_tables(once, notes, recording.values, recording.model)
    lost = [change for change, effect in effects if effect is None]
    lost += [one for one in later if not one.tensors and not any(map(one.is_at, changes))]
    for change, effect in effects:
        if effect is None or effect is _MADE_ANYWAY:
            continue
        if lost and not change.tensors and not change.is_count and not effect.place.is_count:
            lost.append(change)
        else:
            is_constant = change.tensors and _is_constant(change, recording.values, constants)
            if not is_constant or any(map(change.is_at, later)):
                recording.leftovers.note_written(change)  # of a table that is made once, guards see that it is there
            _write(recording, change, effect, change.value)
    return lost


def _write(recording: RecordedCall, change: StateChange, effect: Any, value: Any) -> None:
    """Record the node of an effect."""
    turns = recording.leftovers.turns_at(change)
    recording.write_effect(in_turn(effect, turns), effect.sizes if effect.place.is_count else (value,))


def _effect(change: StateChange, later: Sequence[StateChange], recording: RecordedCall, constants: set[fx.Node]) -> Any:
    """Return the function of a node that makes the change, `_MADE_ANYWAY`, or None if no node can make it."""
    model, values = recording.model, recording.values
    if not all(map(values.has_node_for, change.tensors)):
        return None
    after = next((one.value for one in later if change.is_at(one)), None)
    is_missing = change.before is None and change.key is not None and after is None
    if change.tensors and is_missing and not change.is_buffer and _is_constant(change, values, constants):
        return _MADE_ANYWAY
    return effect_function(change, after, model.get_submodule(change.place.owner))
