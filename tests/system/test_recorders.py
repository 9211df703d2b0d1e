"""The table of benchmarks/recorders.py tells right from silently wrong and from refused."""

from __future__ import annotations

import pytest
from recorders import SWITCHED, TOOLS, Verdict, classify, compiled, page

from tests.semantics.models import functions, modes, regions, values

REGION, STRAIGHT = regions.CASES["no_grad"], functions.CASES["straight-through function"]
VALUE, FORMATTED = values.CASES["if x.sum() > 0"], values.CASES["a formatted value"]


@pytest.mark.parametrize(
    ("case", "tool", "verdict"),
    [
        (REGION, "symbolic_trace", Verdict("silently wrong", "gradients")),
        (REGION, "pipecompile", Verdict("right")),
        (STRAIGHT, "export", Verdict("silently wrong", "gradients")),
        (STRAIGHT, "pipecompile", Verdict("right")),
        (VALUE, "symbolic_trace", Verdict("refused", "TraceError")),
        (VALUE, "pipecompile", Verdict("right")),
        (FORMATTED, "pipecompile", Verdict("refused", "PC199")),
    ],
)
def test_a_case_is_classified(case, tool, verdict) -> None:
    assert classify(case, TOOLS[tool]) == verdict


def test_what_is_recorded_in_training_mode_is_switched() -> None:
    case = modes.CASES["another output in evaluation"]
    assert classify(case, TOOLS["symbolic_trace"], switched=True) == Verdict("silently wrong", "mode")
    assert classify(case, compiled, switched=True) == Verdict("right")


def test_the_page_counts_what_its_rows_say() -> None:
    wrong, right = Verdict("silently wrong", "gradients"), Verdict("right")
    text = page([
        ("regions", "no_grad", {"symbolic_trace": wrong, "export": right, "pipecompile": right}),
        (SWITCHED, "dropout", {"symbolic_trace": right, "export": Verdict("refused", "TypeError"), "pipecompile": right}),
    ])  # fmt: skip
    assert "| symbolic_trace | 1 | 0 | 1 | 0 |" in text
    assert "| export | 1 | 0 | 0 | 1 |" in text
    assert "| no_grad | **wrong: gradients** | right | right |" in text
