"""The numbers of stages and devices, taken from a problem for one number of stages."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from pipecompile.errors import InputError
from pipecompile.partitioners import Node, Problem
from pipecompile.partitioners.machine import Machine

PROBLEM = Problem((Node("a"), Node("b")))


def test_without_lists_all_stages_are_alike() -> None:
    machine = Machine.of(PROBLEM, 3)
    assert len(machine) == 3
    assert machine.device_of == (0, 1, 2)
    assert machine.speed == (1.0, 1.0, 1.0)
    assert machine.memory_limit == (inf, inf, inf)
    assert machine.recompute == (False, False, False)
    assert machine.is_one_to_one
    assert machine.is_uniform
    assert not machine.has_memory_limit


def test_a_list_of_another_length_than_n_stages_is_refused() -> None:
    with pytest.raises(InputError, match="n_stages is 3, but speed lists 2 stages"):
        Machine.of(replace(PROBLEM, speed=(1.0, 2.0)), 3)
    with pytest.raises(InputError, match="n_stages is 3, but in_flight lists 1 stage\n"):
        Machine.of(replace(PROBLEM, in_flight=(1.0,)), 3)
    with pytest.raises(InputError, match="'a' is pinned to stage 3, but n_stages is 3"):
        Machine.of(replace(PROBLEM, pins={"a": 3}), 3)


def test_a_placement_puts_several_stages_on_a_device() -> None:
    machine = Machine.of(replace(PROBLEM, placement=(0, 1, 0), memory_limit=(5.0, 6.0)), 3)
    assert machine.stages_on(0) == [0, 2]
    assert machine.stages_by_device() == [machine.stages_on(device) for device in range(len(machine.speed))]
    assert machine.memory_limit == (5.0, 6.0)
    assert not machine.is_one_to_one
    assert machine.min_link_factor == 0.0  # stages 0 and 2 exchange tensors for free


def test_the_least_link_factor_is_between_different_stages() -> None:
    links = ((0.0, 3.0), (2.0, 0.0))
    machine = Machine.of(replace(PROBLEM, links=links), 2)
    assert machine.link_factor(0, 1) == 3.0
    assert machine.min_link_factor == 2.0
    assert not machine.is_uniform
    assert Machine.of(PROBLEM, 2).min_link_factor == 1.0


@pytest.mark.parametrize(
    ("recompute", "least"), [(None, 2.0), ("auto", 1.0), ((True, False), 1.0), ((False, True), 1.0)]
)
def test_a_stage_that_may_recompute_holds_the_activations_of_one_micro_batch(recompute, least) -> None:
    assert Machine.of(replace(PROBLEM, in_flight=(3.0, 2.0), recompute=recompute), 2).min_in_flight == least


def test_a_uniform_machine_grows_by_stages_and_by_memory() -> None:
    machine = Machine.of(replace(PROBLEM, memory_limit=10.0), 2)
    assert machine.with_stages(4) == Machine.of(replace(PROBLEM, memory_limit=10.0), 4)
    assert machine.with_extra_memory(5.0).memory_limit == (15.0, 15.0)
