"""A list of micro-batches from the user: nothing is divided, and each has arguments of its own sizes.

    step(microbatches=[{"input_ids": (3, 17), ...}, {"input_ids": (2, 40), ...}])

An entry is a mapping of arguments, the target among them; a tuple whose last entry is the target; a `Microbatch`; or the only input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipecompile.batching.batch_dims import BatchDims, parameters_of
from pipecompile.batching.call_inputs import FlatInputs, check_target, flatten
from pipecompile.batching.microbatches import MiniBatch
from pipecompile.batching.offset_rows import is_offsets_beside
from pipecompile.errors import InputError
from pipecompile.text.shown_value import shown, type_text

__all__ = ["ListedBatch", "Microbatch", "MicrobatchList", "arguments_of", "is_list_asked", "read_microbatches"]

_EXAMPLE = 'step(microbatches=[{"x": x, "target": y}, ...])'

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of `step` for one batch, the target among the keywords."""


class Microbatch:
    """The arguments of one micro-batch: `Microbatch(x, mask=mask, target=y)`, as `step` takes them for a mini-batch."""

    __slots__ = ("args", "kwargs", "target")

    def __init__(self, *args: Any, target: Any = None, **kwargs: Any) -> None:
        self.args, self.kwargs, self.target = args, kwargs, target

    def __repr__(self) -> str:
        count = len(self.args) + len(self.kwargs)
        arguments = "1 argument" if count == 1 else f"{count} arguments"
        return f"Microbatch({arguments}{'' if self.target is None else ', target'})"


def arguments_of(batch: Any, *, with_target: bool) -> Arguments:
    """Return the arguments of `step` for a batch of a loader.

    A mapping has them by name, a tuple or list in order, its last entry the target if `loss_fn` takes one. Anything else is the
    only input.
    """
    if isinstance(batch, Microbatch):
        return batch.args, batch.kwargs if batch.target is None else {**batch.kwargs, "target": batch.target}
    if isinstance(batch, Mapping):
        if other := [key for key in batch if not isinstance(key, str)]:
            raise InputError(
                f"a batch has the key {shown(other[0])}", why="its keys are the names of arguments", hint='{"x": x}'
            )
        return (), dict(batch)
    if not isinstance(batch, (tuple, list)):
        return (batch,), {}
    if not batch:
        raise InputError("a batch is an empty sequence", why="it has the inputs in order", hint="(x, target)")
    if with_target and len(batch) == 1:
        raise InputError("a batch has one entry", why="it is the target, and no input is left", hint="(x, target)")
    return (tuple(batch[:-1]), {"target": batch[-1]}) if with_target else (tuple(batch), {})


@dataclass(frozen=True, slots=True)
class MicrobatchList:
    """The calls of the micro-batches in their order, and their targets; None for a micro-batch without a target.

    `is_split`: they are parts of one mini-batch, whose outputs are put together.
    """

    calls: tuple[FlatInputs, ...]
    targets: tuple[Any, ...]
    is_split: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """The samples of each micro-batch; 1 for inputs without a batch dimension."""
        return tuple(call.samples or 1 for call in self.calls)

    @property
    def has_targets(self) -> bool:
        """Whether the micro-batches have targets. All have, or none."""
        return self.targets[0] is not None

    def largest_first(self) -> tuple[FlatInputs, ...]:
        """Return the calls with the one of the most elements in front: costs are measured on it."""
        largest = max(self.calls, key=lambda call: sum(leaf.numel() for leaf in call.tensors))
        return (largest, *(call for call in self.calls if call is not largest))


class ListedBatch(MiniBatch):
    """Micro-batches of a list in the form of a mini-batch whose first micro-batch is recorded."""

    is_listed = True

    def __init__(self, calls: Sequence[FlatInputs]) -> None:
        self.whole, self.sizes, self.calls = calls[0], tuple(call.samples or 1 for call in calls), tuple(calls)


def read_microbatches(
    forward: Callable[..., Any],
    entries: Any,
    batch_dims: BatchDims,
    *,
    with_target: bool,
    is_step: bool,
    is_example: bool = False,
) -> MicrobatchList:
    """Return the calls of a user's list. `with_target`: the last entry of a tuple is the target; `is_step`: targets are allowed;
    `is_example`: they may be missing.

    Raises InputError for an empty list, and for micro-batches with other arguments than the first.
    """
    listed = [arguments_of(entry, with_target=with_target) for entry in _entries(entries)]
    targets = tuple(kwargs.get("target") if is_step else None for _, kwargs in listed)
    _check_targets(targets, with_target=with_target and not is_example)
    calls: list[FlatInputs] = []
    for number, (args, kwargs) in enumerate(listed):
        named = {name: value for name, value in kwargs.items() if not (is_step and name == "target")}
        if calls:
            order = {name: place for place, name in enumerate(calls[0].kwargs)}
            named = dict(sorted(named.items(), key=lambda item: order.get(item[0], len(order))))
        calls.append(_flattened(forward, args, named, batch_dims, number))
        _check_arguments(calls[0], calls[-1], number)
    return MicrobatchList(tuple(calls), targets)


def is_list_asked(forward: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call has a list of micro-batches, and not an argument of this name."""
    return "microbatches" in kwargs and "microbatches" not in parameters_of(forward)


def _entries(entries: Any) -> list[Any]:
    """Return the entries of a list or another iterable. Raise InputError for a single batch, and for an empty list."""
    if isinstance(entries, (Mapping, str, Microbatch)) or not isinstance(entries, Iterable) or hasattr(entries, "dim"):
        raise InputError(f"microbatches is {type_text(entries)}", why="a list has one entry per micro-batch", hint=_EXAMPLE)  # fmt: skip
    listed = list(entries)
    if not listed:
        raise InputError(
            "microbatches is empty", why="a step has at least one micro-batch", hint="skip the step, or " + _EXAMPLE
        )
    return listed


def _check_targets(targets: Sequence[Any], *, with_target: bool) -> None:
    missing = [number for number, target in enumerate(targets) if target is None]
    if missing and (with_target or len(missing) < len(targets)):
        why = "loss_fn takes a target" if with_target else "other micro-batches have one"
        raise InputError(f"micro-batch {missing[0]} has no target", why=why, hint=_EXAMPLE)
    for target in targets:
        check_target(target)


def _check_arguments(first: FlatInputs, other: FlatInputs, number: int) -> None:
    """Raise InputError if a micro-batch has other arguments than the first."""
    if len(first.args) == len(other.args) and first.kwargs.keys() == other.kwargs.keys():
        return
    mine, theirs = (set(call.arguments) for call in (first, other))
    if mine == theirs:
        return
    has, lacks, name = (0, number, min(mine - theirs)) if mine - theirs else (number, 0, min(theirs - mine))
    raise InputError(
        "the micro-batches have different arguments",
        where=f"micro-batch {has} has {name}, micro-batch {lacks} has not",
        hint=f"the same arguments in each: pass {name}=None where there is none",
    )


def _flattened(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], batch_dims: BatchDims, number: int
) -> FlatInputs:
    """Return the flat call of one micro-batch. Offsets of packed sequences do not count as samples."""
    try:
        return flatten(forward, args, kwargs, batch_dims, is_shared=is_offsets_beside)
    except InputError as error:
        where = f"micro-batch {number}" + (f", {error.where}" if error.where else "")
        raise InputError(error.what, where=where, why=error.why, hint=error.hint) from None
