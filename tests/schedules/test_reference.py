"""Every schedule, P and M of the reference: no longer, and no larger, than the best of other generators."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

HOME = Path(__file__).resolve().parents[2] / "benchmarks"


def benchmark() -> Any:
    """benchmarks/schedules.py; the repository has a folder of the same name."""
    spec = importlib.util.spec_from_file_location("benchmark_of_schedules", HOME / "schedules.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BENCHMARK = benchmark()
ROWS = list(BENCHMARK.rows())


def test_the_reference_is_all_there() -> None:
    assert len(ROWS) == 99
    assert sum(row.theirs is not None for row in ROWS) == 96
    assert {row.name for row in ROWS} == set(BENCHMARK.NAMES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}-{row.devices}-{row.microbatches}")
def test_no_worse_in_any_figure(row: Any) -> None:
    assert row.ours.makespan >= row.bound or row.theirs is None
    if row.theirs is not None:
        assert row.ours.no_worse(row.theirs), (row.ours, row.theirs)


def test_the_committed_table_is_what_the_benchmark_writes() -> None:
    assert (HOME / "results" / "schedules.md").read_text() == BENCHMARK.page(ROWS)
