from __future__ import annotations

from pathlib import Path

from golden import CheckGolden

from pipecompile.ir.program_text import parse_program
from pipecompile.passes.liveness import insert_frees

GOLDEN = Path(__file__).parent / "golden" / "liveness.txt"


def test_values_are_freed_after_their_last_use(check_golden: CheckGolden) -> None:
    check_golden(GOLDEN, lambda text: str(insert_frees(parse_program(text))))
