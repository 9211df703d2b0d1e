"""The public surface is a list, and every name on it works."""

from __future__ import annotations

import ast
import difflib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import pipecompile as pc

EXPECTED = [
    "Advice",
    "Candidate",
    "CardPartition",
    "Cluster",
    "ClusterPlan",
    "Considered",
    "CostError",
    "Explanation",
    "InfeasibleError",
    "InputError",
    "LayoutRow",
    "Microbatch",
    "LostCopyWarning",
    "MismatchError",
    "OrderReport",
    "Partition",
    "PartitionError",
    "PartitionWarning",
    "PeriodicProgram",
    "PeriodicSchedule",
    "PipecompileError",
    "Pipeline",
    "PipelineOrder",
    "Plan",
    "PlanError",
    "Problem",
    "Program",
    "RecordingWarning",
    "RunError",
    "Schedule",
    "ScheduleError",
    "SteadyState",
    "StepForecast",
    "Timeline",
    "TraceError",
    "UserPass",
    "VerifyError",
    "advise",
    "auto_schedule",
    "build_periodic",
    "build_schedule",
    "calibrate",
    "check_order",
    "compile",
    "explain",
    "find_period",
    "forecast",
    "insert_offload",
    "insert_overlap",
    "insert_sharding",
    "is_recomputing",
    "latest_checkpoint",
    "lower_periodic",
    "offload_to_fit",
    "partition",
    "partitions",
    "plan_for",
    "read_schedule",
    "register_schedule",
    "repair_order",
    "save_chakra",
    "save_checkpoint",
    "shard_to_fit",
    "simulate",
    "simulate_launches",
    "simulate_periodic",
    "trace",
    "unroll",
    "verify",
]


@pytest.mark.smoke
def test_the_list_is_what_it_is_meant_to_be() -> None:
    assert pc.__all__ == sorted(EXPECTED)
    assert set(pc.__all__) <= set(dir(pc))
    for name in pc.__all__:
        assert inspect.getdoc(getattr(pc, name)), f"{name} has no docstring"


def test_static_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(pc.__file__).read_text())
    imported = {alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported - {None} == set(pc.__all__)


def test_all_errors_have_one_root() -> None:
    errors = [getattr(pc, name) for name in pc.__all__ if name.endswith("Error")]
    assert all(issubclass(error, pc.PipecompileError) for error in errors)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = pc.nonsense


def test_the_house() -> None:
    """Passes and schedules are found at the top of the repository, and no file has outgrown its page."""
    root = Path(pc.__file__).parents[1]
    for name in ("passes", "schedules"):
        assert (root / name).is_symlink()
        assert (root / name).resolve() == root / "pipecompile" / name
    long = {
        path.name: lines
        for path in (root / "pipecompile").rglob("*.py")
        if (lines := path.read_text().count("\n")) > 300
    }
    assert not long


def test_the_first_use_of_a_name_draws_no_random_number() -> None:
    """A script that seeds `random` after its imports draws what it drew without us; the first import of rich draws a number."""
    script = (
        "import random, pipecompile as pc; state = random.getstate(); pc.compile; assert random.getstate() == state"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_name_is_compared_with_all_others_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest asks each module of tests for what it names: 1,500 times, of which each compared 80 names."""
    compared, compare = [], difflib.get_close_matches
    monkeypatch.setattr(
        difflib, "get_close_matches", lambda name, *given: compared.append(name) or compare(name, *given)
    )
    for _ in range(2):
        assert not hasattr(pc, "pytest_has_no_such_name")
    assert compared == ["pytest_has_no_such_name"]
