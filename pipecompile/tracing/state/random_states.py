"""States of the random number generators that a forward may draw from, taken and restored together.

torch, on the CPU and on GPUs in use        the default generators
random, numpy.random                        the global generators
random.Random, numpy Generator, RandomState, torch.Generator
                                            objects that the model holds or that its functions name
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch

from pipecompile.torch_private.accelerators import default_generator, is_accelerator

__all__ = [
    "RANDOM_LOCK",
    "RandomSource",
    "RandomStates",
    "generator_sources",
    "generators_among",
    "python_sources",
    "random_sources",
    "random_states_restored",
    "sources_beside",
]

RANDOM_LOCK = RLock()
"""Lock of the random states of the CPU and of GPUs, which all threads share: held from saving the states until a recomputable forward
has drawn its numbers.
"""


@dataclass(frozen=True, slots=True)
class RandomSource:
    """One generator: its name for messages, and how its state is read, written and advanced by one draw."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    draw: Callable[[], Any]


def generators_among(values: Iterable[Any]) -> list[Any]:
    """Return the generator objects among the values, also those in tuples, each once."""
    kinds, found = _generator_types(), {}
    pending = list(values)
    while pending:
        value = pending.pop()
        if type(value) is tuple:
            pending += value
        elif isinstance(value, kinds) and not isinstance(value, random.SystemRandom):
            found[id(value)] = value
    return list(found.values())


def random_sources(generators: Iterable[Any], devices: Iterable[torch.device] = ()) -> list[RandomSource]:
    """Return the default generators, those of GPUs among `devices`, and these generator objects as sources."""
    default = RandomSource("torch", torch.get_rng_state, torch.set_rng_state, lambda: torch.rand(()))
    sources = [default, *python_sources()]
    found = {torch.device(device.type, device.index or 0) for device in devices if is_accelerator(device)}
    sources += [_of_torch(default_generator(device), f"torch on {device}") for device in sorted(found, key=str)]
    return [*sources, *generator_sources(generators)]


def generator_sources(generators: Iterable[Any]) -> list[RandomSource]:
    """Return these generator objects as sources."""
    return [*map(_of_object, generators)]


def sources_beside(values: Iterable[Any]) -> list[RandomSource]:
    """Return the sources that torch does not hold: the global generators of Python and numpy, and generator objects among the values."""
    return [*python_sources(), *generator_sources(generators_among(values))]


_TORCH = ("torch", "a torch")
"""Beginnings of the names of torch's generators."""


def python_sources() -> list[RandomSource]:
    """Return the global generators of Python and numpy."""
    sources = [RandomSource("random", random.getstate, random.setstate, random.random)]
    if numpy := _numpy_random():
        sources.append(RandomSource("numpy.random", numpy.get_state, numpy.set_state, numpy.random_sample))
    return sources


class RandomStates:
    """The states of these sources at the time of construction."""

    def __init__(self, sources: Iterable[RandomSource]) -> None:
        self.sources = tuple(sources)
        self._states = [source.read() for source in self.sources]

    def of_python(self) -> RandomStates:
        """Return the states of the generators that are not torch's."""
        kept = [place for place, source in enumerate(self.sources) if not source.name.startswith(_TORCH)]
        states = RandomStates(())
        states.sources = tuple(self.sources[place] for place in kept)
        states._states = [self._states[place] for place in kept]
        return states

    def restore(self) -> None:
        """Put every generator back."""
        for source, state in zip(self.sources, self._states, strict=True):
            source.write(state)

    def changed(self) -> tuple[str, ...]:
        """Return the names of the sources whose state is another now."""
        return self.differing(RandomStates(self.sources))

    def differing(self, other: RandomStates) -> tuple[str, ...]:
        """Return the names of the sources whose states differ between two times."""
        triples = zip(self.sources, self._states, other._states, strict=True)
        return tuple(source.name for source, one, two in triples if not _equal(one, two))

    def advance(self, count: int = 1) -> None:
        """Draw numbers from every generator, so that later draws are others."""
        for source in self.sources:
            for _ in range(count):
                source.draw()


@contextmanager
def random_states_restored(sources: Iterable[RandomSource]) -> Iterator[RandomStates]:
    """Restore the generators when the block ends, error or not."""
    states = RandomStates(sources)
    try:
        yield states
    finally:
        states.restore()


def _numpy_random() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)


def _generator_types() -> tuple[type, ...]:
    numpy = _numpy_random()
    return (random.Random, torch.Generator, *((numpy.Generator, numpy.RandomState) if numpy else ()))


def _of_object(generator: Any) -> RandomSource:
    name = f"a {type(generator).__module__.partition('.')[0]}.{type(generator).__name__}"
    if isinstance(generator, torch.Generator):
        return _of_torch(generator, name)
    if isinstance(generator, random.Random):
        return RandomSource(name, generator.getstate, generator.setstate, generator.random)
    if hasattr(generator, "get_state"):  # numpy's RandomState
        return RandomSource(name, generator.get_state, generator.set_state, generator.random_sample)
    bits = generator.bit_generator
    return RandomSource(
        name, lambda: deepcopy(bits.state), lambda state: setattr(bits, "state", state), generator.random
    )


def _of_torch(generator: torch.Generator, name: str) -> RandomSource:
    def draw() -> torch.Tensor:
        return torch.rand((), generator=generator, device=generator.device)

    return RandomSource(name, generator.get_state, generator.set_state, draw)


def _equal(now: Any, then: Any) -> bool:
    """Return whether two states are equal; states are tensors, arrays, or containers of them and numbers."""
    if isinstance(now, torch.Tensor):
        return torch.equal(now, then)
    if isinstance(now, dict):
        return now.keys() == then.keys() and all(_equal(value, then[key]) for key, value in now.items())
    if isinstance(now, (tuple, list)):
        return _are_equal(now, then)
    return bool((now == then).all()) if hasattr(now, "all") else bool(now == then)


def _are_equal(now: Any, then: Any) -> bool:
    """Return whether two sequences are equal. Python's own state has 625 numbers, compared at once; arrays refuse that."""
    try:
        return bool(now == then)
    except (RuntimeError, ValueError):
        return len(now) == len(then) and all(map(_equal, now, then))
