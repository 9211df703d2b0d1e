"""The order of draws of a program, compared with that of the plain loop."""

from __future__ import annotations

import pytest

from pipecompile.ir import Action
from pipecompile.ir.action import Kind
from pipecompile.runtime.draw_order import Draws


def actions(text: str) -> list[Action]:
    """Return actions such as "0F1": stage, kind, micro-batch."""
    kinds = {kind.value: kind for kind in Kind}
    return [Action(int(word[0]), kinds[word[1]], int(word[2])) for word in text.split()]


@pytest.mark.parametrize(
    ("text", "draws", "is_ordered"),
    [
        ("0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1", Draws((0, 1), (0, 1)), True),
        ("0F0 1F0 0F1 1B0 1F1 0B0 1B1 0B1", Draws((0, 1)), True),
        ("0F0 1F0 0F1 1B0 1F1 0B0 1B1 0B1", Draws((0,), (1,)), False),
        ("0F0 1F0 0F1 1F1 1B0 1B1 0B0 0B1", Draws((), (1,)), True),
        ("0F0 1F0 0F1 1F1 1B0 1B1 0B0 0B1", Draws((), (0, 1)), False),
        ("0F0 0F1 1F0 1F1 1B0 0B0 1B1 0B1", Draws((0, 1)), False),
        ("0F0 0F1 1F0 1F1 1B0 0B0 1B1 0B1", Draws((1,)), True),
        ("0F0 0F2 0F1 1F0 1F2 1F1", Draws((0,)), False),
        ("0F0 0R0 0B0 0F1 0R1 0B1", Draws((0,), (0,)), True),
        ("0F0 0I0 0F1 0W0 0I1 0W1", Draws((), (0,)), True),
        ("0F0 0I0 0F1 0I1 0W0 0W1", Draws((), (0,)), False),
    ],
)
def test_the_order_is_that_of_the_loop(text: str, draws: Draws, *, is_ordered: bool) -> None:
    assert draws.is_that_of_the_loop(actions(text)) == is_ordered


@pytest.mark.parametrize(
    ("draws", "threaded", "words"),
    [
        (Draws((0, 2)), True, ["stages 0, 2, which run in threads", "dispatch='inline'"]),
        (Draws((0, 1)), False, ["stages 0, 1, which run in the order of the schedule", "a device for each stage"]),
        (
            Draws((1,)),
            True,
            ["in stage 1, which runs in threads of its own", "Try dispatch='inline', with a device for each"],
        ),
        (Draws((0,), (1,)), False, ["in the backward of stages 0, 1", "n_microbatches=1"]),
    ],
)
def test_a_warning_says_where_and_what_to_try(draws: Draws, words: list[str], *, threaded: bool) -> None:
    text = draws.warning(threaded=threaded)
    assert all(word in text for word in words), text
