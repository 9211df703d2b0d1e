"""Changes of a model after it was compiled, as ranks compare them: each rank records anew what another one has changed, and runs
its own stages.

rank 0   no change                       records, for rank 1 does ─┐
rank 1   model.scale: 1.0 -> 2.0         records                   ─┴─► an error on both that names rank 1 and the change
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pipecompile.distributed.communicator import Communicator
from pipecompile.distributed.failures.failure_report import (
    CopyDisagreement,
    Disagreement,
    FailureReport,
    RankLost,
    ranks_of_texts,
)
from pipecompile.errors import PipecompileError
from pipecompile.tracing.guards.state_guards import ReadChange

__all__ = ["agree_on_error", "agree_on_recording"]

_GRAPH = "graph of the model"
"""Name of the exchange after ranks have recorded, or have failed to."""

_FAILED = "failed"
"""First entry of the row of a rank that could not record, in place of the identity of a graph."""

_PARTS = "modules of the model"
"""Name of the exchange of ranks that have recorded other graphs."""

_SHOWN, _LENGTH = 2, 80
"""Changes or modules of a rank that an error shows, and the length to which the text of a module is cut."""

_LEFT = {
    "what": "a forward has left other values on the model than it had, and a later call reads them",
    "why": "every rank runs its own stages: the value is left on the rank of its stage, and the others record with the old one",
    "hint": "a table of the largest size in __init__, or computed in every call; a buffer of one shape for what calls update",
}
_CHANGED = {
    "what": "the model was changed on some ranks alone after it was compiled",
    "why": "every rank runs its own stages of one model; ranks would run parts of different ones",
    "hint": "the same change of the model on every rank, not under `if rank == 0`",
}
"""Parts of the errors of ranks that have recorded other values."""

_OF_ONE_RANK = ".requires_grad"
"""End of the labels of what a rank may change alone: `pipe.parameters()` has those of its own stages, to be frozen."""


def agree_on_recording(
    communicator: Communicator,
    identity: str,
    structure: str,
    changes: Sequence[ReadChange],
    *,
    inputs: Sequence[str],
    is_loaded: bool,
    in_copy: bool,
    parts: Callable[[], Mapping[str, str]] = dict,
    written: Collection[str] = (),
) -> None:
    """Raise Disagreement, on all ranks, or on those of this copy, unless all have recorded the same graph after changes of the same values.

    `identity` stands for the graph, `structure` for the graph without its constants, and `inputs` are their names in order, `parts` returns what
    each module does, and `written` are the names of attributes that forwards have left on the model. If a rank `is_loaded`, with the
    extra state of its own modules, structures alone are compared: the rank that runs a module has its values.
    """
    changes = [change for change in changes if not change.label.endswith(_OF_ONE_RANK)]
    changes.sort(key=lambda change: not change.label.startswith("model"))  # then what code that runs now reads besides
    labels, texts = [change.label for change in changes], [*map(str, changes)]
    own = json.dumps([identity, labels, texts, structure, is_loaded, [*inputs], [*written]])
    rows = [json.loads(text) for text in communicator.all_gather_text(_GRAPH, own, in_copy=in_copy)]
    if failed := next((row for row in rows if row[0] == _FAILED), None):
        raise RankLost(FailureReport.from_json(failed[1]), is_posted=False)
    if any(row[4] for row in rows):
        rows = [[row[3], [], [], *row[3:]] for row in rows]
    if all(row[:2] == rows[0][:2] for row in rows):
        return
    ranks = communicator.ranks.copy if in_copy else communicator.ranks.members
    is_of_all = ranks == communicator.ranks.members
    modules = [json.loads(text) for text in communicator.all_gather_text(_PARTS, json.dumps(parts()), in_copy=in_copy)]
    raise (Disagreement if is_of_all else CopyDisagreement)(**_parts_of_error(rows, ranks, modules))


def agree_on_error(communicator: Communicator, error: PipecompileError, *, in_copy: bool) -> None:
    """Take part with an error in the exchange of graphs. If all ranks of all copies have one, the pipeline goes on after it."""
    own = json.dumps([_FAILED, FailureReport.of(error, communicator.rank).to_json()])
    with suppress(RankLost, Disagreement):
        texts = communicator.all_gather_text(_GRAPH, own, in_copy=in_copy)
        if len(texts) == len(communicator.ranks.members) and all(json.loads(text)[0] == _FAILED for text in texts):
            communicator.guard.common = error


def _parts_of_error(
    rows: Sequence[Sequence[Any]], ranks: Sequence[int], modules: Sequence[Mapping[str, str]]
) -> dict[str, str]:
    """Return what an error says of ranks that differ in their changes, or in their graphs alone."""
    if any(row[1] != rows[0][1] for row in rows):
        kind = _LEFT if _are_left_by_forward(rows) else _CHANGED
        return kind | {"where": ranks_of_texts(ranks, [_changes(row[2]) for row in rows])}
    if any(row[5] != rows[0][5] for row in rows):
        is_order = all(sorted(row[5]) == sorted(rows[0][5]) for row in rows)
        return {
            "what": f"the ranks give the model {'its inputs in different orders' if is_order else 'different inputs'}",
            "where": ranks_of_texts(ranks, [", ".join(row[5]) or "no inputs" for row in rows]),
            "why": "keyword arguments and dicts keep the order in which they are written, and a forward may read them in it",
            "hint": "the same inputs on every rank, keyword arguments and keys of dicts in one order",
        }
    return {
        "what": "the ranks disagree about the graph of the model",
        "where": ranks_of_texts(ranks, _unlike_modules(modules) or [row[0] for row in rows]),
        "why": "every rank runs its part of one program",
        "hint": "the same model, options, mode and batch on every rank",
    }


def _are_left_by_forward(rows: Sequence[Sequence[Any]]) -> bool:
    """Return whether all that has changed on some ranks alone is of names that forwards write."""
    written = {name for row in rows for name in row[6]}
    every = {label for row in rows for label in row[1]}
    unlike = [label for label in every if not all(label in row[1] for row in rows)]
    return bool(unlike) and all(label.rpartition(".")[2] in written for label in unlike)


def _unlike_modules(modules: Sequence[Mapping[str, str]]) -> list[str]:
    """Return, per rank, the first modules that do something else than on other ranks; nothing if all do the same."""
    every = sorted({path for row in modules for path in row})
    unlike = [path for path in every if len({row.get(path) for row in modules}) > 1]
    texts = [[f"{path or 'the model'}: {_cut(row[path])}" for path in unlike if path in row] for row in modules]
    return [_some(row) or f"no {unlike[0] or 'calls'}" for row in texts] if unlike else []


def _cut(text: str) -> str:
    return text if len(text) <= _LENGTH else f"{text[: _LENGTH - 3]}..."


def _some(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more


def _changes(texts: Sequence[str]) -> str:
    return _some(texts) or "no change"
