"""Wires the flags: `--update-golden`, which golden.py explains, and `--full`. Property tests draw the same examples in every run;
`--hypothesis-profile default` draws new ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings

if TYPE_CHECKING:
    from golden import CheckGolden

torch.set_num_threads(1)  # as each of several workers has: with more, sums come in other orders
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="all combinations, where a quarter of them is run otherwise")
    parser.addoption("--update-golden", action="store_true", help="rewrite the expected text of golden files")


@pytest.fixture
def check_golden(request: pytest.FixtureRequest) -> CheckGolden:
    from golden import golden_check  # after the path is set

    return golden_check(bool(request.config.getoption("--update-golden")))
