"""The verifier of a recording: on one micro-batch it computes what the model itself computes, gradients and draws included.

    model, eager       values A ─┐
    recording          values B ─┼─►  A = B bit for bit: right. Else, with several threads or on a GPU, a second eager run
    model, eager again values C ─┘    tells how far eager is from itself

Runs start from the same states of all generators. If the model draws random numbers, the comparison is repeated from other
states: a draw that became a constant of the recording is right in the first comparison only by chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pipecompile.batching.containers import flatten_containers
from pipecompile.errors import MismatchError, PipecompileError
from pipecompile.text.shown_value import shown
from pipecompile.torch_private import pytree
from pipecompile.tracing.state.random_states import RandomStates
from pipecompile.tracing.state.signal_errors import signal_errors_kept
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.tracing.user_source import line_of, raiser
from pipecompile.verifiers.attention_fast_path import FAST_PATH, SLOW_PATH, may_take_fast_path, slow_path
from pipecompile.verifiers.eager_run import GRADIENT, CheckedCall, Observation, observe, random_states_of, undone
from pipecompile.verifiers.first_difference import first_difference

__all__ = ["Verdict", "verify_recording"]

_REPEAT, _RANDOM = 4, 100
"""Ratios up to which a recording may be further from an eager run than a second eager run is: if roundings explain the distance of these
two, and if not, because both draw from a source that no seed repeats."""

_ROUNDINGS, _MOST_ROUNDINGS = 8, 1000
"""Roundings of a value's largest number by which a recording may differ: without a word, because sums come in other orders with several
threads and on a GPU; and with a warning, because a model may take another way while it is recorded (an attention mask of ones)."""

_FURTHEST = 1e-3
"""No warning excuses more than this part of a value's largest number, unless that is a few roundings, as in half precision."""


@dataclass(frozen=True, slots=True)
class _Difference:
    """One value that differs: its name, and how far. `is_rounding` says whether roundings may explain it."""

    name: str
    text: str
    is_rounding: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a comparison that found no error.

    `obstacle` says why there was none: the model or the recording raises on these inputs. `doubt` names a value that differs, but
    by so little that roundings may explain it. Each is "" where there is nothing to say.
    """

    obstacle: str = ""
    doubt: str = ""


def verify_recording(graph: TracedGraph, call: CheckedCall) -> Verdict:
    """Return a verdict. Raise MismatchError if the recording does not compute what the model computes."""
    start = random_states_of(call)
    try:
        eager = _observed(call.model, call, start)
        recorded = _observed(graph.forward, call, start)
        if isinstance(eager, Exception) or isinstance(recorded, Exception):
            return Verdict(obstacle=_raised(graph, call, eager, recorded))
        doubt = _compare(graph, call, start, eager, recorded)
        if eager.drawn:
            start.restore()
            start.advance()
            other = RandomStates(start.sources)
            again = _compare(graph, call, other, observe(call.model, call, other), observe(graph.forward, call, other))
            doubt = doubt or again
        return Verdict(doubt=doubt)
    finally:
        start.restore()


@signal_errors_kept()
def _observed(function: Any, call: CheckedCall, start: RandomStates) -> Observation | Exception:
    """Return what a run shows, or what it raises. Raise OutOfMemoryError."""
    try:
        return observe(function, call, start)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return error


def _raised(graph: TracedGraph, call: CheckedCall, eager: Any, recorded: Any) -> str:
    """Raise MismatchError if the model alone raises, or the recording of a model that notices it; else the step will raise the same."""
    if isinstance(eager, Exception) and not isinstance(recorded, Exception):
        raise MismatchError(
            f"{type(call.model).__name__} raises {type(eager).__name__} on this mini-batch, and its recording does not: {eager}",
            where=raiser(eager),
            why="the call that raises is not a call of torch, so it is not a node of the recording",
            hint="torch._assert in the place of Python's condition; check=False goes on with the recording as it is",
        ) from eager
    noticed = graph.facts.noticed_at
    if noticed and not isinstance(eager, Exception) and not isinstance(recorded, PipecompileError):
        raise MismatchError(
            f"the recording of {type(call.model).__name__} raises {type(recorded).__name__}, and the model does not: {recorded}",
            where=line_of(noticed),
            why="the model notices there that it is recorded, and takes another way then",
            hint="pass what the model makes by itself there, such as an attention mask, in the shape that its layers take",
        ) from recorded
    return f"a micro-batch raises {type(recorded).__name__}"


def _compare(
    graph: TracedGraph, call: CheckedCall, start: RandomStates, eager: Observation, recorded: Observation
) -> str:
    """Compare an eager run with one of the recording. Return the first value that differs, as roundings may explain; "" if none does.

    Raises MismatchError.
    """
    differences = list(_differences(eager, recorded, {}, 0))
    sources = eager.ends.differing(recorded.ends)
    if differences or sources:  # both may draw anew in every run: several threads, torch.seed()
        again, own = observe(call.model, call, start), observe(graph.forward, call, start)
        pairs = ((eager.values, again.values), (recorded.values, own.values))
        noise = {name: _noise(*((first.get(name), other.get(name)) for first, other in pairs)) for name in eager.values}
        is_exact = call.device.type == "cpu" and torch.get_num_threads() == 1
        differences = list(_differences(eager, recorded, noise, 0 if is_exact else _ROUNDINGS))
        random = {*eager.ends.differing(again.ends)} & {*recorded.ends.differing(own.ends)}
        sources = tuple(source for source in sources if source not in random)
    wrong = [difference for difference in differences if not difference.is_rounding]
    if not wrong and sources:
        text = f"the model and the recording do not draw alike from {' and '.join(sources)}"
        wrong = [_Difference("random numbers", text)]
    if wrong:
        raise _mismatch(graph, call, start, wrong, eager, is_fast=_is_right_without_fast_path(call, start, recorded))
    return str(differences[0]) if differences else ""


def _is_right_without_fast_path(call: CheckedCall, start: RandomStates, recorded: Observation) -> bool:
    """Return whether the recording computes what the model computes once the fast path of attention is off."""
    if not may_take_fast_path(call.model, with_grad=call.with_grad):
        return False
    with slow_path():
        slow = _observed(call.model, call, start)
    return isinstance(slow, Observation) and all(one.is_rounding for one in _differences(slow, recorded, {}, 0))


def _differences(
    eager: Observation, recorded: Observation, noise: Mapping[str, float], roundings: int
) -> Iterator[_Difference]:
    """Yield the values that differ by more than the noise and `roundings` roundings."""
    if eager.structure != recorded.structure and recorded.structure != _rebuilt(eager.structure):
        yield _Difference("the output", f"has the structure {recorded.structure} instead of {eager.structure}")
        return
    steepest = 0.0  # a gradient of zero, as that of a bias before BatchNorm, is a sum of roundings of others
    for name, value in eager.values.items():
        other = recorded.values.get(name)
        if (text := _kind_difference(value, other)) is not None:
            yield _Difference(name, text)
            continue
        if not isinstance(value, torch.Tensor) or not (distance := _distance(value, other)):
            continue
        eps, largest = _eps(value), _largest(value)
        if name.startswith(GRADIENT):
            gradients = (each for name, each in eager.values.items() if name.startswith(GRADIENT))
            steepest = steepest or max(_largest(each) for each in gradients if isinstance(each, torch.Tensor))
            largest = steepest
        if distance > noise.get(name, 0.0) + roundings * eps * largest:
            is_rounding = distance <= max(_ROUNDINGS * eps, min(_MOST_ROUNDINGS * eps, _FURTHEST)) * largest
            yield _Difference(
                name, f"differs by {distance:.3g}; its largest value is {_largest(value):.3g}", is_rounding
            )


def _rebuilt(structure: Any) -> Any:
    """Return the structure that torch's pytree rebuilds from this one: a torch.Size becomes a tuple."""
    return flatten_containers(pytree.tree_unflatten([0] * structure.num_leaves, structure))[1]


def _kind_difference(value: Any, other: Any) -> str | None:
    """Return how two values differ in kind: type, shape, dtype; None if they do not."""
    if not isinstance(value, torch.Tensor):
        same = type(value) is type(other) and (value is other or _plainly_equal(value, other))
        return None if same else f"is {_shown(other)} instead of {_shown(value)}"
    if not isinstance(other, torch.Tensor):
        return f"is {_shown(other)} instead of {_shown(value)}"
    if (value.shape, value.dtype) != (other.shape, other.dtype):
        return f"is {_shown(other)} instead of {_shown(value)}"
    return None


def _plainly_equal(value: Any, other: Any) -> bool:
    """Return whether two plain values are equal; objects without an equality of their own count as equal."""
    if isinstance(value, float) and math.isnan(value):
        return math.isnan(other)
    if getattr(type(value), "__eq__", None) is object.__eq__:
        return True
    try:
        return bool(value == other)
    except (TypeError, ValueError, RuntimeError):
        return True


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return shown(value)


def _distance(value: Any, other: Any) -> float:
    """Return the largest difference of two tensors; 0 if they are equal, NaN in the same places included."""
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor) or value.shape != other.shape:
        return 0.0
    one, two = _dense(value), _dense(other)
    if torch.equal(one, two) or value.numel() == 0:
        return 0.0
    one, two = _wide(one), _wide(two)
    different = ~((one == two) | (one.isnan() & two.isnan()))
    if not bool(different.any()):
        return 0.0
    distance = float((one - two).abs()[different].max())
    return math.inf if math.isnan(distance) else distance


def _noise(runs: tuple[Any, Any], recorded: tuple[Any, Any]) -> float:
    """Return how far a value may be from that of the recording, from two runs of the model and two of the recording.

    What differs in the runs of the model alone is a constant of the recording: it may not be off by more than roundings.
    """
    if not (distance := _distance(*runs)):
        return 0.0
    if distance <= _MOST_ROUNDINGS * _eps(runs[0]) * _largest(runs[0]):
        return _REPEAT * distance
    return _RANDOM * distance if _distance(*recorded) else 0.0


def _dense(value: torch.Tensor) -> torch.Tensor:
    return value if value.layout is torch.strided else value.to_dense()


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _largest(value: torch.Tensor) -> float:
    return float(_wide(_dense(value)).abs().nan_to_num(0, 0, 0).max()) if value.numel() else 0.0


def _eps(value: torch.Tensor) -> float:
    return torch.finfo(value.dtype).eps if value.is_floating_point() or value.is_complex() else 0.0


def _mismatch(
    graph: TracedGraph,
    call: CheckedCall,
    start: RandomStates,
    differences: list[_Difference],
    eager: Observation,
    *,
    is_fast: bool,
) -> MismatchError:
    """Return the error, with the first node whose value no call of the model computes. `is_fast` says that only the fast path differs."""
    with undone(call), torch.inference_mode(False), torch.set_grad_enabled(call.with_grad):
        place = first_difference(graph, call, start)
    first, count = differences[0], len(differences)
    more = f", and {count - 1} more" if count > 1 else ""
    why = "Python of the model decides by a value that the recording took as a constant, or changes what was recorded"
    if kept := ", ".join(reason.piece.name for reason in graph.facts.kept if not reason.piece.line):
        why += f". What {kept}, kept whole, leaves on the model is not recorded: return it from forward"
    if noticed := graph.facts.noticed_at:
        why += f". The model notices that it is recorded ({line_of(noticed)}), and may take another way then"
    if eager.drawn:
        why += f". The model draws from {', '.join(eager.drawn)}"
    what = f"the recording of {type(call.model).__name__} is not what the model computes: {first}{more}"
    if is_fast:
        return MismatchError(what, where=place, why=FAST_PATH, hint=SLOW_PATH)
    return MismatchError(
        what,
        where=place,
        why=why,
        hint="compute the value in torch, as an argument of forward or as a buffer; check=False goes on with the recording as it is",
    )
