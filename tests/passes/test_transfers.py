from __future__ import annotations

from pathlib import Path

from golden import CheckGolden

from pipecompile.ir.program_text import parse_program
from pipecompile.passes.transfers import insert_transfers

GOLDEN = Path(__file__).parent / "golden" / "transfers.txt"


def test_values_go_once_to_each_device_that_needs_them(check_golden: CheckGolden) -> None:
    check_golden(GOLDEN, lambda text: str(insert_transfers(parse_program(text))))
