from __future__ import annotations

from pathlib import Path

from golden import CheckGolden

from pipecompile.ir import Schedule
from pipecompile.passes.split_backward import split_backward

GOLDEN = Path(__file__).parent / "golden" / "split_backward.txt"


def test_b_becomes_i_and_w(check_golden: CheckGolden) -> None:
    def run(text: str) -> str:
        first, _, rows = text.partition("\n")
        return str(split_backward(Schedule.from_csv(rows), int(first.removeprefix("delay "))))

    check_golden(GOLDEN, run)
