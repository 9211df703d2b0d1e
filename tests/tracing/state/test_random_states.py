"""States of generators: found, taken, compared, advanced and put back together."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from pipecompile.tracing.state.random_states import RandomStates, generators_among, random_sources

OBJECTS = {
    "random": lambda: random.Random(0),
    "numpy": lambda: np.random.default_rng(0),
    "numpy's older": lambda: np.random.RandomState(0),
    "torch": lambda: torch.Generator().manual_seed(0),
}


def test_generators_are_found_also_in_tuples_and_once() -> None:
    made = [make() for make in OBJECTS.values()]
    found = generators_among([1, made[0], (made[1], (made[2],)), made[0], made[3], random.SystemRandom()])
    assert {id(one) for one in found} == {id(one) for one in made}


@pytest.mark.parametrize("kind", OBJECTS)
def test_a_draw_changes_the_state_and_restoring_repeats_it(kind: str) -> None:
    generator = OBJECTS[kind]()
    sources = random_sources([generator])
    states = RandomStates(sources)
    assert states.changed() == ()
    first = sources[-1].draw()
    assert states.changed() == (sources[-1].name,)
    states.restore()
    assert states.changed() == ()
    assert sources[-1].draw() == first


def test_the_global_generators_are_among_the_sources() -> None:
    states = RandomStates(random_sources([]))
    states.advance()
    assert states.changed() == ("torch", "random", "numpy.random")
    states.restore()
