from __future__ import annotations

import random
from itertools import pairwise

import networkx as nx
import pytest

from pipecompile.verifiers.deadlock import deadlocks


def cycles(text: str) -> list[str]:
    """One row a line, one step a word: `c<d` gives c and waits for d."""
    rows = [[word.split("<") for word in line.split()] for line in text.strip().splitlines()]
    return deadlocks([[(tuple("".join(s[1:])), s[0]) for s in row] for row in rows], lambda r, i: rows[r][i][0])


@pytest.mark.parametrize(
    "text",
    ["a b c", "a b<d\nc d<a", "a<b\nb", "a<x b<yz"],
    ids=["no waits", "back and forth", "the later row first", "nobody gives x"],
)
def test_rows_that_can_all_end(text: str) -> None:
    assert cycles(text) == []


def test_a_cycle_is_drawn_through_what_is_waited_for_and_what_waits() -> None:
    assert cycles("a c<d\nb<c d") == [
        "deadlock, each waits for the next: c (device 0) -> d (device 1) -> b (device 1) -> c (device 0)\n"
        "      device 0 │ … c* …\n"
        "      device 1 │ … b* d …"
    ]


def test_every_cycle_is_reported_and_those_who_only_wait_for_one_are_not() -> None:
    first, second = cycles("a<b\nb<a\nc<a\nd<e\ne<d")
    assert "a (device 0) -> b (device 1) -> a (device 0)\n" in first
    assert "d (device 3) -> e (device 4) -> d (device 3)\n" in second


def test_there_is_a_deadlock_just_when_the_graph_of_waits_has_a_cycle() -> None:
    rng, stuck = random.Random(0), 0
    for _ in range(300):
        names = [chr(97 + i) for i in range(rng.randint(2, 9))]
        cut = rng.randint(1, len(names) - 1)
        drawn = [[(n, rng.sample(names, rng.randint(0, 1))) for n in part] for part in (names[:cut], names[cut:])]
        graph = nx.DiGraph()
        for row in drawn:
            graph.add_edges_from((later[0], earlier[0]) for earlier, later in pairwise(row))
            graph.add_edges_from((name, need) for name, needs in row for need in needs)
        steps = [[(tuple(needs), name) for name, needs in row] for row in drawn]
        found = deadlocks(steps, lambda r, i, drawn=drawn: drawn[r][i][0])
        assert bool(found) == (not nx.is_directed_acyclic_graph(graph))
        stuck += bool(found)
    assert 30 < stuck < 270
