"""Imports go down the floors of the house, and never in a circle."""

from __future__ import annotations

import ast
from collections.abc import Callable

import networkx as nx
from source import PACKAGE, Import, imports, module_names, tree_of, where

FLOORS = (
    ("errors", "torch_private"),
    ("text",),
    ("ir", "batching", "partitioners"),
    ("tracing",),
    ("verifiers",),
    ("graph", "simulation"),
    ("costs", "parameters", "passes", "show"),
    ("runtime", "schedules"),
    ("interchange", "settings"),
    ("options",),
    ("planning",),
    ("driver",),
    ("pipeline",),
    ("distributed",),
    ("compiling",),
    ("layouts",),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
"""The folders and root modules of the package, lowest first. A floor imports from itself and from those before it."""

FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def room_of(module: str) -> str:
    """Return the folder or root module that a dotted module name belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(module) for module in module_names()}
    assert rooms == set(FLOOR_OF)


def test_imports_go_down() -> None:
    upward = [str(edge) for edge in imports() if FLOOR_OF[room_of(edge.imported)] > FLOOR_OF[room_of(edge.importer)]]
    assert not upward, "imports of a higher floor:\n" + "\n".join(upward)


def test_folders_form_no_circle() -> None:
    edges = {(room_of(edge.importer), room_of(edge.imported)) for edge in imports()}
    between = {(a, b) for a, b in edges if a != b}
    assert not circles(between), "\n".join(lines_between(circles(between), room_of))


def test_modules_form_no_circle() -> None:
    edges = {(edge.importer, edge.imported) for edge in imports()}
    assert not circles(edges), "\n".join(lines_between(circles(edges), str))


def circles(edges: set[tuple[str, str]]) -> list[set[str]]:
    return [component for component in nx.strongly_connected_components(nx.DiGraph(edges)) if len(component) > 1]


def lines_between(components: list[set[str]], name_of: Callable[[str], str]) -> list[str]:
    """Return the lines that tie each circle together."""

    def is_inside(edge: Import, component: set[str]) -> bool:
        importer, imported = name_of(edge.importer), name_of(edge.imported)
        return importer != imported and importer in component and imported in component

    return [str(edge) for component in components for edge in imports() if is_inside(edge, component)]


def test_partitioners_ir_and_text_are_free_of_torch() -> None:
    lines = []
    for folder in ("text", "ir", "partitioners"):
        for path in (PACKAGE / folder).rglob("*.py"):
            for node in ast.walk(tree_of(path)):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                lines += [f"{where(path, node.lineno)}: {name}" for name in names if name.split(".")[0] == "torch"]
    assert not lines, "\n".join(lines)
