"""Can rows that wait for one another all be walked to their end?

    row 0    a   c*         c waits for d, which row 1 gives after b; b waits for e, which row 0 gives after c:
    row 1    b*  d                c -> d -> b -> e -> c
             ...                  (* = where the row is stuck)

Giving never waits. Then it does not matter in which order the rows are walked, and one walk, each row as far as it gets,
decides. Linear; a cycle is looked for only among the rows that are stuck, at most one step each.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import networkx as nx

__all__ = ["Step", "deadlocks"]

Step = tuple[tuple[Hashable, ...], Hashable]
"""What a step needs before it can be done, and what it gives then; None gives nothing."""

Name = Callable[[int, int], object]
"""How a step is written, by its row and its place in it."""


def deadlocks(rows: Sequence[Sequence[Step]], name: Name) -> list[str]:
    """One text per cycle of rows that wait for one another; none when all rows end. A need nobody gives is no wait."""
    stuck = _stuck(rows, None)
    if not stuck:
        return []
    origin = {gives: (row, index) for row, steps in enumerate(rows) for index, (_, gives) in enumerate(steps)}
    waits = nx.DiGraph()
    for row, (index, need) in _stuck(rows, origin).items():
        giver, late = origin[need]
        waits.add_edge(row, giver, stuck=index, awaited=late)
    return [_drawn([(*edge, waits.edges[edge]) for edge in _around(cycle)], name) for cycle in nx.simple_cycles(waits)]


def _around(cycle: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(cycle, [*cycle[1:], cycle[0]], strict=True))


def _stuck(
    rows: Sequence[Sequence[Step]], origin: dict[Hashable, tuple[int, int]] | None
) -> dict[int, tuple[int, Hashable]]:
    """The rows that do not end: the place where each waits, and what for. Without `origin` every need is a wait."""
    given: set[Hashable] = set()
    at, waiting = [0] * len(rows), dict[Hashable, list[int]]()
    stuck: dict[int, tuple[int, Hashable]] = {}
    ready = list(range(len(rows)))
    while ready:
        row = ready.pop()
        stuck.pop(row, None)
        steps = rows[row]
        for index in range(at[row], len(steps)):
            needs, gives = steps[index]
            for need in needs:
                if need not in given and (origin is None or need in origin):
                    stuck[row] = index, need
                    waiting.setdefault(need, []).append(row)
                    break
            if row in stuck:
                at[row] = index
                break
            if gives is not None:
                given.add(gives)
                if gives in waiting:
                    ready += waiting.pop(gives)
    return stuck


Edge = tuple[int, int, dict[str, int]]
"""Row `a` waits at its step `stuck` for step `awaited` of row `b`."""


def _drawn(cycle: list[Edge], name: Name) -> str:
    """`a -> d -> b -> e -> a`, a step that is both waited for and waiting written once; then each row of the cycle."""
    links = [(row, edge["stuck"], giver, edge["awaited"]) for row, giver, edge in cycle]
    names = [text for a, i, b, k in links for text in (f"{name(a, i)} (device {a})", f"{name(b, k)} (device {b})")]
    path = [text for index, text in enumerate(names) if index == 0 or names[index - 1] != text]
    closed = path if path[-1] == path[0] else [*path, path[0]]
    lines = ["deadlock, each waits for the next: " + " -> ".join(closed)]
    for position, (row, _, edge) in enumerate(cycle):
        wanted = cycle[position - 1][2]["awaited"]
        between = " " if wanted == edge["stuck"] + 1 else " … "
        rest = "" if wanted == edge["stuck"] else f"{between}{name(row, wanted)}"
        lines.append(f"      device {row} │ … {name(row, edge['stuck'])}*{rest} …")
    return "\n".join(lines)
