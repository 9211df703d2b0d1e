"""Models that are easily recorded wrong: the graph does what the model does, the pipeline what the plain loop does."""

from __future__ import annotations

from itertools import chain

import pytest

from tests.semantics.agreement import agrees, piped, recorded
from tests.semantics.models import functions, hooks, modes, regions, state, values

THEMES = {"functions": functions, "hooks": hooks, "modes": modes, "regions": regions, "state": state, "values": values}
CASES = list(chain.from_iterable([(theme, name) for name in module.CASES] for theme, module in THEMES.items()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("theme", "name"), CASES)
def test_the_graph_does_what_the_model_does(theme: str, name: str) -> None:
    agrees(THEMES[theme].CASES[name], recorded, 1, (4, 3))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("theme", "name"), CASES)
def test_the_pipeline_does_what_the_plain_loop_does(theme: str, name: str) -> None:
    case = THEMES[theme].CASES[name]
    agrees(case, piped, 1 if case.mixes or case.merged else 2, (4,))
