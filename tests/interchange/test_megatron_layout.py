"""Megatron-LM's layouts: 1,000 are read as they were written, and run the order of their stages per rank."""

from __future__ import annotations

from random import Random

import pytest
from drawn_orders import drawn_layout

from pipecompile.errors import ScheduleError
from pipecompile.interchange import read_schedule
from pipecompile.interchange.megatron_layout import is_layout, megatron_order, parse_layout
from pipecompile.schedules import build_schedule


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Et|tt|L", ("Et", "tt", "L")),
        ("Et*3|(tt|)*2,m|L", ("Ettt", "tt", "tt", "m", "L")),
        ("E||t|L", ("E", "", "t", "L")),
        ("(t|(tt|)*2)*2t", ("t", "tt", "tt", "t", "tt", "tt", "t")),
        ("t*2*3", ("t" * 6,)),
    ],
)
def test_a_layout_has_the_layers_of_every_stage(text: str, stages: tuple[str, ...]) -> None:
    assert parse_layout(text) == stages
    assert is_layout(text)


def test_the_layout_of_61_layers_runs_interleaved_on_16_ranks() -> None:
    order = megatron_order("Et*3|(tt|)*29m|L", 16, 32)
    assert order.schedule == build_schedule("interleaved", 32, 32, n_devices=16)
    assert order.weights == (3.0, *[2.0] * 29, 1.0, 0.0)
    assert megatron_order("Et|tt|tL").schedule == build_schedule("1f1b", 3, 6)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("block", range(20))
def test_a_thousand_layouts_are_read_as_they_were_written(block: int) -> None:
    for seed in range(50 * block, 50 * block + 50):
        stages = parse_layout(drawn_layout(Random(seed)))
        assert parse_layout("|".join(stages)) == stages
        order = megatron_order("|".join(stages), None, Random(seed).randint(1, 4))
        again = read_schedule(order.name)
        assert (again, again.name, again.weights) == (order, order.name, order.weights)


@pytest.mark.parametrize(
    ("text", "place"),
    [("t|x", 3), ("(t", 3), ("t)", 2), ("*3t", 1), ("t*0", 2), ("t*9999*9999", 7), ("t*", 2)],
)
def test_a_mistake_has_its_place(text: str, place: int) -> None:
    with pytest.raises(ScheduleError, match=f"character {place}"):
        parse_layout(text)


def test_stages_go_evenly_onto_ranks() -> None:
    with pytest.raises(ScheduleError, match="3 stages do not go evenly onto 2 ranks"):
        megatron_order("t|t|t", 2)
