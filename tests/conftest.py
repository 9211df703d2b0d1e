"""Wires the flag `--update-golden`; what it does is in golden.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
"""So that tests can import the helpers beside this file, whatever pytest's import mode."""

from golden import CheckGolden, golden_check  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the expected text of golden files")


@pytest.fixture
def check_golden(request: pytest.FixtureRequest) -> CheckGolden:
    return golden_check(bool(request.config.getoption("--update-golden")))
