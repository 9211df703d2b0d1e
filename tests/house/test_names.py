"""A name means one thing: classes, files and folders."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from source import PACKAGE, classes, module_name, paths, where

import pipecompile

PARALLEL = ({"ir", "verifiers"}, {"passes", "verifiers"}, {"tracing", "verifiers"})
"""Folders whose files answer to each other: the verifier of a level, or of what a pass adds, is called like it."""


def test_no_two_classes_of_one_name() -> None:
    places = defaultdict(list)
    for path in paths():
        for node in classes(path):
            places[node.name].append(where(path, node.lineno))
    twice = {name: lines for name, lines in places.items() if len(lines) > 1}
    assert not twice, "\n".join(f"class {name}: {', '.join(lines)}" for name, lines in twice.items())


def test_a_file_name_recurs_only_in_parallel_folders() -> None:
    places = defaultdict(list)
    for path in paths():
        if path.name not in ("__init__.py", "__main__.py"):
            places[path.name].append(path)
    twice = [files for files in places.values() if len(files) > 1 and not are_parallel(files)]
    assert not twice, "\n".join(" and ".join(str(path.relative_to(PACKAGE)) for path in files) for files in twice)


def are_parallel(files: list[Path]) -> bool:
    folders = {path.relative_to(PACKAGE).parts[0] for path in files}
    return len(folders) == len(files) and any(folders <= pair for pair in PARALLEL)


def test_no_module_is_called_like_a_public_function() -> None:
    public = set(pipecompile.__all__)
    clashes = [module_name(path) for path in paths() if path.parent == PACKAGE and path.stem in public]
    assert not clashes
