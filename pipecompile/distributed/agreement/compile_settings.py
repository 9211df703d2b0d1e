"""The options of `compile` that must be equal on all ranks, as text: ranks compare them before their first message.

    rank 0   loss_reduction='mean'  schedule='1f1b'  ...  ─┐
    rank 1   loss_reduction='sum'   schedule='1f1b'  ...  ─┴─► loss_reduction: rank 0 'mean'; rank 1 'sum'     on both

Functions are compared by name, place in their file and floats that they close over. Left out is what the first rank alone uses to plan,
in its own seconds and bytes, and what changes no result: `cost`, `time_limit`, `memory_limit`, `check`, `progress` and others.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import nn

from pipecompile.distributed.failures.failure_report import Disagreement
from pipecompile.errors import InputError
from pipecompile.ir import Schedule
from pipecompile.ir.plan import Plan
from pipecompile.ir.written_program import WrittenProgram
from pipecompile.options import Options
from pipecompile.passes.user_passes import UserPass

__all__ = ["SETTINGS", "check_runs_on_ranks", "check_settings", "reschedule_text", "settings_text"]

SETTINGS = (
    "n_stages",
    "n_microbatches",
    "batch_dims",
    "split",
    "schedule",
    "loss_fn",
    "loss_reduction",
    "has_aux",
    "batch_norm",
    "across_batch",
    "partitioner",
    "plan",
    "tied",
    "checkpoint",
    "restored",
    "offload",
    "reshard_after_forward",
    "lost_copies",
    "gradient_sums",
    "compile_stages",
    "passes",
    "init",
    "shards",
)
"""Names of the options that are compared, beside those of the cut."""

_CONSTRAINTS = {"split_before": "split_before", "keep_together": "together", "pin": "pins", "balance": "balanced"}
"""Options of the cut, and their names in its constraints."""

_PLAIN = (bool, int, float, str)


def settings_text(options: Options) -> str:
    """Return the options that are compared, as text."""
    values = {name: getattr(options, name) for name in SETTINGS}
    values |= {name: getattr(options.steering, field) for name, field in _CONSTRAINTS.items()}
    return json.dumps({name: _text(value) for name, value in values.items()})


def reschedule_text(options: Options) -> str:
    """Return the call of `reschedule` that leads to these options, as text."""
    return f"reschedule({_text(options.schedule)}, n_microbatches={options.n_microbatches})"


def check_runs_on_ranks(options: Options) -> None:
    """Raise InputError for options of a step that needs all stages in one process."""
    if options.across_batch == "exact":
        raise InputError(
            'across_batch="exact" is given for stages on several ranks',
            why="the samples meet behind the last stage, in a part of the model that other ranks have no gradients of",
            hint="devices=[...], the stages in one process",
        )


def check_settings(texts: Sequence[str], ranks: Sequence[int]) -> None:
    """Raise Disagreement unless the texts of all ranks are equal; it names who has what."""
    if len(set(texts)) < 2:
        return
    settings = [json.loads(text) for text in texts]
    other = [name for name in settings[0] if len({one[name] for one in settings}) > 1]
    raise Disagreement(
        f"the ranks have other options of compile: {', '.join(other)}",
        where="; ".join(_who_has(name, [one[name] for one in settings], ranks) for name in other),
        why="each rank runs its part of one step",
        hint="compile with the same options on every rank",
    )


def _who_has(name: str, values: Sequence[str], ranks: Sequence[int]) -> str:
    ranks_of: dict[str, list[str]] = {}
    for rank, value in zip(ranks, values, strict=True):
        ranks_of.setdefault(value, []).append(str(rank))
    return "; ".join(
        f"rank{'s' * (len(some) > 1)} {', '.join(some)}: {name}={value}" for value, some in ranks_of.items()
    )


def _text(value: Any) -> str:
    """Return a text that is equal on all ranks of a script for values that are alike."""
    if isinstance(value, _PLAIN) or value is None:
        return repr(value)
    if isinstance(value, Plan):
        cut = value.fingerprint, sorted(value.stage_of.items()), value.placement, value.recompute
        return f"a plan ({_digest(str(cut))})"
    if isinstance(value, WrittenProgram):
        return f"a Program ({_digest(str(value.program))})"
    if isinstance(value, Schedule):
        pairs = sorted(map(str, value.overlaps))
        return f"a Schedule ({_digest(str((value.n_microbatches, value.placement, value.rows, pairs)))})"
    if isinstance(value, UserPass):
        return f"{value.title}, {_function(value.run)}"
    if isinstance(value, Path):
        return "a checkpoint"  # hosts may have it in other places
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_text(value[key])}" for key in sorted(value, key=repr)) + "}"
    if isinstance(value, (list, tuple, set, frozenset)):
        return "[" + ", ".join(map(_text, value)) + "]"
    return _function(value)


def _function(value: Any) -> str:
    """Return a text for a function, a partial, a module or another callable."""
    if isinstance(value, functools.partial):
        return f"{_function(value.func)} with {_floats(dict(enumerate(value.args)) | value.keywords)}"
    if isinstance(value, nn.Module):
        return f"{type(value).__qualname__}({_floats(vars(value))})"
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if (code := getattr(value, "__code__", None)) is None:
        return str(name)
    cells = dict(zip(code.co_freevars, value.__closure__ or (), strict=False))
    closed = {key: _content(cell) for key, cell in cells.items()}
    defaults = dict(enumerate(value.__defaults__ or ())) | (value.__kwdefaults__ or {})
    settings = ", ".join(filter(None, [_floats(closed), _floats(defaults)]))
    place = f"{name} at {Path(code.co_filename).name}:{code.co_firstlineno}"
    return f"{place} with {settings}" if settings else place


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is not filled yet
        return None


def _floats(values: Mapping[Any, Any]) -> str:
    """Return the floats among the values of a mapping, such as weights, but for what begins with an underscore. Integers, flags and
    texts may tell ranks from each other.
    """
    floats = {key: value for key, value in values.items() if isinstance(value, float) and not str(key).startswith("_")}
    return ", ".join(f"{key}={value!r}" for key, value in sorted(floats.items(), key=str))


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:12]
