"""A second call of the model, in the state that the first one left, to find out what becomes of that state.

It is recorded after the first one, compared with it and taken away again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from pipecompile.batching.call_inputs import FlatInputs
from pipecompile.errors import RecordingWarning, TraceError
from pipecompile.torch_private import pytree
from pipecompile.tracing.emit.value_nodes import Values
from pipecompile.tracing.model_pieces import Piece
from pipecompile.tracing.node_facts import Role, facts
from pipecompile.tracing.state.leftover_state import Change, Watch, alike, from_constants, writer

if TYPE_CHECKING:
    from pipecompile.tracing.recorder import Recorder

__all__ = ["Carried", "settle"]


class Carried(TraceError):
    """A call depends on what the one before left. `pieces` may be kept whole instead, the smallest first."""

    def __init__(self, changes: Sequence[Change], model: nn.Module) -> None:
        owners = sorted({change.place.owner for change in changes} - {""}, key=lambda path: -path.count("."))
        self.pieces = [Piece(path) for path in owners]
        names = ", ".join(dict.fromkeys(change.name for change in changes))
        file = type(model).forward.__code__ if hasattr(type(model).forward, "__code__") else None
        where = f"{file.co_filename}:{file.co_firstlineno} in {file.co_qualname}" if file else ""
        super().__init__(code="PC114", where=where, why=f"it changes {names}, and the next call is another one for it")


def settle(recorder: Recorder, inputs: FlatInputs) -> None:
    """Write down what the call that was recorded left on the model. Raises Carried when that is not for a graph to do."""
    changes = recorder.remains.changes()
    if not changes:
        return
    recorder.regions.close()
    model, values = recorder.model, recorder.values
    first = _computed(values.graph)
    if recorder.remains.depends(changes):
        raise Carried(changes, model)
    try:
        later = _again(recorder, inputs)
    except Exception as error:
        raise Carried(changes, model) from error
    second = [node for node in _computed(values.graph) if node not in set(first)]
    free = from_constants(first, training=model.training)
    same = alike(first, second, free)
    _erase(values.graph, set(first))
    kept: dict[bool, list[Change]] = {True: [], False: []}
    for change in changes:
        kept[_free(change, values, free)].append(change)
    if not (same and _places(kept[False]) == _places(later) - _places(kept[True])):
        raise Carried(changes, model)
    lost = [change.name for change in changes if not _written(change, later, values, free, recorder.write_effect)]
    if lost:
        what = f"{type(model).__name__}.forward changes {', '.join(dict.fromkeys(lost))}, which no graph can; it stays as it is"
        warnings.warn(what, RecordingWarning, stacklevel=2)


def _again(recorder: Recorder, inputs: FlatInputs) -> list[Change]:
    """Call the model once more, on other tensors for the same inputs. Buffers are as the first call found them."""
    placeholders = [node for node in recorder.graph.nodes if node.op == "placeholder"]
    with recorder.kept_whole():
        leaves = [recorder.twin(leaf, dim) for leaf, dim in zip(inputs.leaves, inputs.dims, strict=True)]
    for twin, node in zip(leaves, placeholders, strict=True):
        if isinstance(twin, torch.Tensor):
            recorder.values.bind(twin, node)
    args, kwargs = pytree.tree_unflatten(leaves, inputs.spec)
    with recorder.values.as_found(), recorder.kept.again():
        between = Watch(recorder.model)
        recorder.model(*args, **kwargs)
        recorder.regions.close()
        return recorder.remains.changes(between)


def _places(changes: Sequence[Change]) -> set[tuple[int, Any, int]]:
    """Where tensors were left, and how many at the end of a list."""
    return {
        (id(change.place.container), change.key, len(change.value) if change.key is None else 0)
        for change in changes
        if change.tensors
    }


def _free(change: Change, values: Values, free: set[fx.Node]) -> bool:
    """Is it a table, which a recording may make anew?"""
    return all(values.knows(tensor) and values.node(tensor) in free for tensor in change.tensors)


def _computed(graph: fx.Graph) -> list[fx.Node]:
    called = ("call_function", "call_method", "call_module")
    return [node for node in graph.nodes if node.op in called and facts(node).role is Role.VALUE]


def _erase(graph: fx.Graph, first: set[fx.Node]) -> None:
    """Everything after the first call, but sizes."""
    last = max((index for index, node in enumerate(graph.nodes) if node in first), default=-1)
    for node in reversed(list(graph.nodes)[last + 1 :]):
        if not node.users and node.op not in ("placeholder", "get_attr") and not facts(node).is_size:
            graph.erase_node(node)


def _written(
    change: Change, later: Sequence[Change], values: Values, free: set[fx.Node], write: Callable[..., None]
) -> bool:
    if not all(map(values.knows, change.tensors)):
        return False
    if change.tensors and _free(change, values, free):
        return True
    then = next((c.value for c in later if c.place.container is change.place.container and c.key == change.key), None)
    function = writer(change, then)
    if function is not None:
        write(function, () if change.is_count else (change.value,))
    return function is not None
