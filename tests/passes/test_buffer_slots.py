from __future__ import annotations

from pathlib import Path

from golden import CheckGolden

from pipecompile.ir.program_text import parse_program
from pipecompile.passes.buffer_slots import assign_slots

GOLDEN = Path(__file__).parent / "golden" / "slots.txt"


def test_slots_are_reused_once_they_are_free(check_golden: CheckGolden) -> None:
    check_golden(GOLDEN, lambda text: str(assign_slots(parse_program(text))))
