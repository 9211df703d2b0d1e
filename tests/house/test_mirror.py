"""Tests mirror the tree: the test of `pipecompile/passes/liveness.py` is `tests/passes/test_liveness.py`."""

from __future__ import annotations

from source import PACKAGE, ROOT, paths

ACROSS = {"docs", "house", "semantics", "support", "system"}
"""Folders of tests that are not about one module: pages, the house itself, small models, helpers, whole pipelines."""


def test_every_module_has_a_test_of_its_name() -> None:
    missing = []
    for path in paths():
        module = path.relative_to(PACKAGE)
        test = ROOT / "tests" / module.parent / f"test_{module.name}"
        if not module.name.startswith("__") and not test.exists():
            missing.append(str(test.relative_to(ROOT)))
    assert not missing, f"{len(missing)} modules have no test of their name:\n" + "\n".join(missing)
