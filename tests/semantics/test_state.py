from __future__ import annotations

import pytest

from tests.semantics.agreement import agrees, piped, recorded
from tests.semantics.models.state import CASES


@pytest.mark.parametrize("name", CASES)
def test_the_graph_does_what_the_model_does(name: str) -> None:
    agrees(CASES[name], recorded, 1, (4, 3))


@pytest.mark.parametrize("name", CASES)
def test_the_pipeline_does_what_the_plain_loop_does(name: str) -> None:
    agrees(CASES[name], piped, 2, (4,))
