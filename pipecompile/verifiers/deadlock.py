"""Deadlock detection for rows of steps that wait for one another.

    row 0    a   c*         c waits for d, which row 1 provides after b; b waits for e, which row 0 provides after c:
    row 1    b*  d                c -> d -> b -> e -> c
             ...                  (* = where the row is stuck)

Providing never waits. The order in which rows advance therefore does not matter: one walk, each row as far as possible,
decides. Linear. Cycles are searched only among the stuck rows, with at most one step per row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import networkx as nx

__all__ = ["Step", "deadlocks"]

Step = tuple[tuple[Hashable, ...], Hashable]
"""The needs of a step, and the event that the step provides after them; None provides nothing."""

Name = Callable[[int, int], object]
"""Returns the text of a step from its row and its index in the row."""


def deadlocks(rows: Sequence[Sequence[Step]], name: Name) -> list[str]:
    """Return one text per cycle of rows that wait for one another; none if all rows end.

    A need that no step provides is not a wait.
    """
    stuck = _stuck(rows, None)
    if not stuck:
        return []
    origin = {provides: (row, index) for row, steps in enumerate(rows) for index, (_, provides) in enumerate(steps)}
    waits = nx.DiGraph()
    for row, (index, need) in _stuck(rows, origin).items():
        provider, provided_at = origin[need]
        waits.add_edge(row, provider, stuck=index, awaited=provided_at)
    return [
        _drawn([(*edge, waits.edges[edge]) for edge in _edges_of(cycle)], name) for cycle in nx.simple_cycles(waits)
    ]


def _edges_of(cycle: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(cycle, [*cycle[1:], cycle[0]], strict=True))


def _stuck(
    rows: Sequence[Sequence[Step]], origin: dict[Hashable, tuple[int, int]] | None
) -> dict[int, tuple[int, Hashable]]:
    """Return, for each row that does not end, the index of its waiting step and the awaited need.

    Without `origin` every need is a wait; with `origin`, only the needs that a step provides.
    """
    provided: set[Hashable] = set()
    position, waiting = [0] * len(rows), dict[Hashable, list[int]]()
    stuck: dict[int, tuple[int, Hashable]] = {}
    ready = list(range(len(rows)))
    while ready:
        row = ready.pop()
        stuck.pop(row, None)
        steps = rows[row]
        for index in range(position[row], len(steps)):
            needs, provides = steps[index]
            for need in needs:
                if need not in provided and (origin is None or need in origin):
                    stuck[row], position[row] = (index, need), index
                    waiting.setdefault(need, []).append(row)
                    break
            else:
                provided.add(provides)
                if provides in waiting and provides is not None:
                    ready += waiting.pop(provides)
                continue
            break
    return stuck


Edge = tuple[int, int, dict[str, int]]
"""Rows a and b, and where: row a waits at its step `stuck` for step `awaited` of row b."""


def _drawn(cycle: list[Edge], name: Name) -> str:
    """Return `a -> d -> b -> e -> a`, with a step that is both awaited and waiting only once, and each row of the
    cycle.
    """
    links = [(row, edge["stuck"], provider, edge["awaited"]) for row, provider, edge in cycle]
    names = [text for a, i, b, k in links for text in (f"{name(a, i)} (device {a})", f"{name(b, k)} (device {b})")]
    path = [text for index, text in enumerate(names) if index == 0 or names[index - 1] != text]
    closed = path if path[-1] == path[0] else [*path, path[0]]
    lines = ["deadlock, each waits for the next: " + " -> ".join(closed)]
    for position, (row, _, edge) in enumerate(cycle):
        awaited = cycle[position - 1][2]["awaited"]
        between = " " if awaited == edge["stuck"] + 1 else " … "
        rest = "" if awaited == edge["stuck"] else f"{between}{name(row, awaited)}"
        lines.append(f"      device {row} │ … {name(row, edge['stuck'])}*{rest} …")
    return "\n".join(lines)
