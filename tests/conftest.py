"""Wires the flags: `--update-golden`, which golden.py explains, and `--full`. Property tests draw the same examples in every run;
`--hypothesis-profile default` draws new ones.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings

if TYPE_CHECKING:
    from golden import CheckGolden

COLLECTION = (10_000, 10, 10)
"""Numbers of objects after which garbage is collected: Python's own, for smaller programs, take a tenth of the time of all tests."""

TESTS = Path(__file__).parent

SEARCHED = {"partitioners", "planning"}
"""Folders whose tests search cuts with all effort."""

FEW = 15
"""Examples of a property that are not halved."""

_SETTINGS = "_hypothesis_internal_use_settings"
"""Attribute in which hypothesis keeps the settings of a test."""

gc.disable()  # until all tests are there
torch.set_num_threads(1)  # as each of several workers has: with more, sums come in other orders
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="all combinations and examples, where a part of them is run otherwise"
    )
    parser.addoption("--update-golden", action="store_true", help="rewrite the expected text of golden files")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one of N cases of a test that is marked `sampled(N)`, and half of the examples of a property, unless all are asked for with
    `--full`.
    """
    if config.getoption("--full"):
        return
    _halve_examples(items)
    tests: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            tests[item.nodeid.partition("[")[0]].append(item)
    left_out = {item for cases in tests.values() for item in _left_out(cases)}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _halve_examples(items: list[pytest.Item]) -> None:
    for test in {item.obj for item in items if isinstance(item, pytest.Function) and hasattr(item.obj, _SETTINGS)}:
        all_of_them: settings = getattr(test, _SETTINGS)
        number = all_of_them.max_examples
        setattr(test, _SETTINGS, settings(all_of_them, max_examples=max(number // 2, min(number, FEW))))


def pytest_collection_finish() -> None:
    gc.set_threshold(*COLLECTION)
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _thaws() -> Iterator[list[bool]]:
    """Return a list that is empty while all objects of before are frozen: to count them takes 10 ms."""
    thaws = [True]

    def unfreeze(original: Callable[[], None] = gc.unfreeze) -> None:
        thaws.append(True)
        original()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", unfreeze)
        yield thaws


@pytest.fixture(autouse=True)
def _frozen(_thaws: list[bool]) -> None:
    """Leave what all tests have in common, a million objects, out of collections. A search of the memory by a recording unfreezes it."""
    if _thaws:
        _thaws.clear()
        gc.collect(1)  # what the test before has left; a collection of all would take a second
        gc.freeze()


def _left_out(cases: Sequence[Any]) -> set[pytest.Item]:
    from sampling import numbered, sample  # after the path is set

    one_of = cases[0].get_closest_marker("sampled").args[0]
    taken = sample(numbered([case.callspec.params for case in cases]), one_of)
    return {case for number, case in enumerate(cases) if number not in taken}


@pytest.fixture(autouse=True, scope="session")
def _no_late_seeds() -> Iterator[None]:
    """Let `torch.manual_seed` not note its call, with the stack as text, for accelerators that are not there: 1.5 ms each time."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.accelerator.is_available():
            for module in (torch.cuda, torch.xpu, torch.mtia):
                patch.setattr(module, "manual_seed_all", lambda _seed: None, raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_sweep() -> Iterator[None]:
    from quick_compiles import measure_once  # after the path is set

    with pytest.MonkeyPatch.context() as patch:
        measure_once(patch)
        yield


@pytest.fixture(autouse=True, scope="module")
def _brief_searches(request: pytest.FixtureRequest) -> Iterator[None]:
    from quick_compiles import search_briefly  # after the path is set

    with pytest.MonkeyPatch.context() as patch:
        if request.path.relative_to(TESTS).parts[0] not in SEARCHED:
            search_briefly(patch)
        yield


@pytest.fixture
def check_golden(request: pytest.FixtureRequest) -> CheckGolden:
    from golden import golden_check  # after the path is set

    return golden_check(bool(request.config.getoption("--update-golden")))
