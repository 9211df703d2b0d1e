"""Costs of pairs of actions that overlap are checked, and named where they are wrong."""

from __future__ import annotations

import pytest

from pipecompile.errors import InputError
from pipecompile.ir import Kind
from pipecompile.simulation.overlap_costs import checked_overlap, communication_seconds

SECONDS = {Kind.FORWARD: (1.0, 2.0), Kind.BACKWARD: (2.0, 4.0), Kind.INPUT_GRAD: (1.0, 2.0)}


def test_one_number_or_a_number_per_pair():
    assert checked_overlap(None, 2) is None
    assert checked_overlap(3, 2) == 3.0
    assert checked_overlap({(0, 1): 2}, 2) == {(0, 1): 2.0}


@pytest.mark.parametrize("pairs", [{(0, 2): 1.0}, {0: 1.0}, {(0, 1, 1): 1.0}])
def test_a_key_that_is_no_pair_of_stages_is_refused(pairs):
    with pytest.raises(InputError, match="overlap has an entry for"):
        checked_overlap(pairs, 2)


def test_communication_is_part_of_the_action():
    assert communication_seconds(SECONDS, 0.0, 0.0) == ()
    assert communication_seconds(SECONDS, [0.5, 1.0], 1.0) == ((0.5, 1.0), (1.0, 1.0))
    with pytest.raises(InputError, match=r"stage 0 communicates for 1.5 s within F, which takes 1 s"):
        communication_seconds(SECONDS, 1.5, 0.0)
