"""Can rows that wait for one another all be walked to their end?

    row 0    a   c*         c waits for d, which row 1 gives after b; b waits for e, which row 0 gives after c:
    row 1    b*  d                c -> d -> b -> e -> c
             ...                  (* = where the row is stuck)

Sends are buffered: giving never waits. Then it does not matter in which order the rows are walked, and one walk, each
row as far as it gets, decides. Linear; a cycle is looked for only among the rows that are stuck, at most one step each.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import networkx as nx

__all__ = ["Wait", "deadlocks"]


@dataclass(frozen=True, slots=True)
class Wait:
    """One step of a row: it waits until all of `needs` were given, then gives `gives`. `what` is written in a fault."""

    what: object
    needs: tuple[Hashable, ...] = ()
    gives: Hashable = None


def deadlocks(rows: Sequence[Sequence[Wait]]) -> list[str]:
    """One line per cycle of rows that wait for one another; none when all rows end. A need nobody gives is no wait."""
    origin = {step.gives: (row, index) for row, steps in enumerate(rows) for index, step in enumerate(steps)}
    waits = nx.DiGraph()
    for row, (step, need) in _stuck(rows, origin).items():
        giver, index = origin[need]
        waits.add_edge(row, giver, text=_links(step, row, rows[giver][index], giver))
    cycles = (zip(rows, [*rows[1:], rows[0]], strict=True) for rows in nx.simple_cycles(waits))
    return [_draw([waits.edges[edge]["text"] for edge in cycle]) for cycle in cycles]


def _stuck(rows: Sequence[Sequence[Wait]], origin: dict[Hashable, tuple[int, int]]) -> dict[int, tuple[Wait, Hashable]]:
    """The rows that do not end: the step at which each waits, and what for."""
    given: set[Hashable] = set()
    at = [0] * len(rows)
    waiting: dict[Hashable, list[int]] = {}
    stuck: dict[int, tuple[Wait, Hashable]] = {}
    ready = list(range(len(rows)))
    while ready:
        row = ready.pop()
        stuck.pop(row, None)
        while at[row] < len(rows[row]):
            step = rows[row][at[row]]
            need = next((need for need in step.needs if need not in given and need in origin), None)
            if need is not None:
                waiting.setdefault(need, []).append(row)
                stuck[row] = step, need
                break
            at[row] += 1
            if step.gives is not None:
                given.add(step.gives)
                ready += waiting.pop(step.gives, ())
    return stuck


def _links(step: Wait, row: int, need: Wait, giver: int) -> tuple[str, str]:
    return f"{step.what} (device {row})", f"{need.what} (device {giver})"


def _draw(links: list[tuple[str, str]]) -> str:
    """`a -> d -> b -> e -> a`; a step that is both waited for and waiting is written once."""
    names = [name for link in links for name in link]
    chain = [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]
    closed = chain if chain[-1] == chain[0] else [*chain, chain[0]]
    return "deadlock, each waits for the next: " + " -> ".join(closed)
