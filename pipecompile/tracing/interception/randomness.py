"""Random numbers in a recording: draws of torch, which become nodes, and draws of Python, which cannot.

    torch.manual_seed(3)                ──►   manual_seed(3)      one node, which counts as writing the state
    h + torch.rand(4)                         rand(4)             a draw; stays in the stage of its seed
    torch.rand(4, generator=self.generator)   rand(4, ...)        a draw; the node has the generator
    torch.rand(4, generator=Generator())      PC116               a node would go on drawing from the one of the recording
    if random.random() > 0.2: ...             PC116               at this line; the piece around it becomes an opaque node

Draws of torch without a seed in the model only keep their order, so that a pipeline draws what the plain loop draws. A draw of
`random`, `numpy.random` or a generator object is not a call of torch, so its value would be a constant of the recording. A recording
notices that the state of a generator is another at its end. Only then it runs again, with Python's trace function, to find the line.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dis import opmap
from functools import cache, wraps
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from pipecompile.errors import TraceError
from pipecompile.torch_private.modes import ObservingMode, active_fake_mode, disable_current_modes
from pipecompile.torch_private.modules import forwards_of
from pipecompile.torch_private.operators import schema_of
from pipecompile.tracing.state.random_states import RandomStates, generator_sources, generators_among
from pipecompile.tracing.user_source import caller, is_users, place_of

__all__ = [
    "RNG_FUNCTIONS",
    "KnownGenerators",
    "RandomDrawCounter",
    "advanced_states",
    "draw_refused",
    "draws_random",
    "draws_located",
    "python_draws",
    "refuse_draws",
    "rng_function",
]

RNG_FUNCTIONS = ("manual_seed", "seed", "get_rng_state", "set_rng_state")
"""Functions of torch, and of torch.random, that read or set the state of the default generator."""

_PROBABILITIES, _IN_TRAINING = ("dropout_p", "dropout"), ("train", "training")
"""Arguments with which an operator draws nothing, if the first are 0 or the second False."""


class RandomDrawCounter(ObservingMode):  # type: ignore[no-untyped-call]
    """Counts the operators that draw random numbers, in `count`."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.count += draws_random(func, args, kwargs)
        return func(*args, **kwargs)

    def note_layer(self, called: Any, args: Sequence[Any] = ()) -> int:
        """Count a layer or function that draws without an operator to show it. Return the count."""
        self.count += _drops_between_layers(called, args)
        return self.count


class KnownGenerators:
    """The generators of torch that outlive a call, among these values, and their states when the recording begins."""

    def __init__(self, values: Iterable[Any]) -> None:
        found = [one for one in generators_among(values) if isinstance(one, torch.Generator)]
        self._states = {id(one): RandomStates(generator_sources([one])) for one in found}  # keep their generators alive

    def check(self, arguments: Iterable[Any]) -> None:
        """Raise TraceError PC116 for a generator among the arguments that the forward has made or seeded."""
        for one in arguments:
            if isinstance(one, torch.Generator) and one is not torch.default_generator:
                if id(one) not in self._states:
                    raise _from_forward("made")
                _check_state(self._states[id(one)])

    def check_piece(self, arguments: Iterable[Any]) -> None:
        """Raise TraceError PC116 before a piece is called that may draw from a generator that the forward has made or seeded."""
        self.check(arguments)
        for state in self._states.values():
            _check_state(state)


def _check_state(state: RandomStates) -> None:
    """Raise TraceError PC116 if a generator has another state than when the recording began."""
    with disable_current_modes():
        is_seeded = bool(state.changed())
    if is_seeded:
        raise _from_forward("seeded")


def _from_forward(made: str) -> TraceError:
    return TraceError(
        code="PC116", where=caller(), why=f"the generator is {made} in the forward, which a recording runs once"
    )


def draws_random(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether this call of an operator draws random numbers: attention with `dropout_p=0.0` and LSTMs in evaluation do not."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    arguments = schema_of(func).arguments
    given = {argument.name: argument.default_value for argument in arguments}
    given |= dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)
    is_off = any(given.get(name) == 0 for name in _PROBABILITIES)
    return not is_off and not any(given.get(name) is False for name in _IN_TRAINING)


_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def _drops_between_layers(called: Any, args: Sequence[Any]) -> bool:
    """Return whether a recurrent module or function draws the dropout between its layers. The decompositions of torch, which fake
    tensors run, leave it out (2.14), so that no operator shows it.
    """
    if isinstance(called, nn.Module):
        layers = (one for one in called.modules() if isinstance(one, nn.RNNBase))
        return any(one.training and one.dropout > 0 and one.num_layers > 1 for one in layers)
    if getattr(called, "__name__", "") not in _RECURRENT:
        return False
    numbers = [value for value in args if isinstance(value, (bool, int, float))]  # biases, layers, dropout, train, ...
    return len(numbers) > 3 and numbers[1] > 1 and numbers[2] > 0 and bool(numbers[3])


@cache
def rng_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as the graph calls it: on fake tensors it leaves the state alone, and returns an empty state or None."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if active_fake_mode() is None:
            return function(*args, **kwargs)
        returns_state = function.__name__ == "get_rng_state"
        return torch.empty(torch.default_generator.get_state().numel(), dtype=torch.uint8) if returns_state else None

    return call


def advanced_states(states: RandomStates) -> RandomStates:
    """Advance the generators that are not torch's by a draw, and return the states of all sources.

    A call that seeds them itself (`np.random.seed(self.seed)`) ends in the same state each time, which may be that of before: from here it is another.
    """
    states.of_python().advance()
    return RandomStates(states.sources)


def python_draws(states: RandomStates) -> tuple[str, ...]:
    """Return the generators that Python has drawn from; draws of torch are nodes."""
    return states.of_python().changed()


def draw_refused(states: RandomStates, place: str, near: str = "") -> TraceError:
    """Return the error for a draw at this place; `near` says if it is only near there."""
    return TraceError(code="PC116", where=place, why=f"{near}it draws from {' and '.join(python_draws(states))}, and would be a constant of the recording")  # fmt: skip


@contextmanager
def draws_located(states: RandomStates) -> Iterator[None]:
    """Raise TraceError PC116 in the user's function whose line changes one of the states inside the block."""
    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks only in settrace whether any frame asks for operations
    sys.settrace(_Locator(states).enter)
    try:
        yield
    finally:
        sys.settrace(before)


_BEHIND = ("CALL", "PRECALL", "FOR_ITER", "SEND", "YIELD", "BEFORE_", "WITH_", "UNPACK", "GET_", "IMPORT", "FORMAT")
"""Beginnings of the names of Python's operations that may draw other than in a user function whose end is looked at."""

_DRAWLESS = frozenset(number for name, number in opmap.items() if not name.startswith(_BEHIND))
"""The other operations, most of all. To compare the states of all generators takes longer than most operations."""


class _Locator:
    """A trace function: behind calls in the user's functions, and at their ends, it looks whether a generator was drawn from.

    `drawer` is the frame that drew, and `place` its line. The error is raised when that frame goes on: an error raised while a
    function returns would not have its frame in the traceback, by which the piece is found.
    """

    def __init__(self, states: RandomStates) -> None:
        self.states = states.of_python()
        self.drawer: FrameType | None = None
        self.place = ""

    def enter(self, frame: FrameType, event: str, _: Any) -> Any:
        if event != "call" or not is_users(frame):
            return None
        self._look(_users_caller(frame))
        step = self._steps_of(frame)
        frame.f_trace, frame.f_trace_opcodes = (
            step,
            True,
        )  # Python 3.13 asks for operations of frames with a function alone
        return step

    def _steps_of(self, frame: FrameType) -> Callable[..., Any]:
        """Return the trace function of one frame. Behind an operation that draws nothing it does not look.

        What the frame has drawn before it ends, the frame around it has drawn by its call.
        """
        operations, previous = frame.f_code.co_code, -1

        def step(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal previous
            if event == "opcode":
                if previous not in _DRAWLESS:
                    self._look(frame)
                if self.drawer is frame:
                    sys.settrace(None)
                    raise draw_refused(self.states, self.place)
                previous = operations[frame.f_lasti]
            elif event == "return":
                self._look(_users_caller(frame))
            return step

        return step

    def _look(self, frame: FrameType | None) -> None:
        if self.drawer is None and frame is not None and python_draws(self.states):
            self.drawer, self.place = frame, place_of(frame, frame.f_lineno)


def _users_caller(frame: FrameType) -> FrameType | None:
    """Return the innermost user frame around a frame."""
    outer = frame.f_back
    while outer is not None and not is_users(outer):
        outer = outer.f_back
    return outer


class _Recorder(Protocol):
    """A recorder that runs its model inside of `located`."""

    model: nn.Module
    located: AbstractContextManager[None]

    def record(self, inputs: Any) -> object: ...


def refuse_draws(recorder: _Recorder, inputs: Any, states: RandomStates) -> NoReturn:
    """Record again to find the line at which Python draws random numbers, and raise TraceError PC116 there."""
    recorder.located = draws_located(states)
    recorder.record(inputs)
    functions = map(inspect.unwrap, forwards_of(recorder.model))
    code = next((one.__code__ for one in functions if hasattr(one, "__code__")), None)
    place = f"{code.co_filename}:{code.co_firstlineno} in {code.co_qualname}" if code else ""
    raise draw_refused(states, place, "around this function, in a decorator or a hook, ")  # no user line drew
