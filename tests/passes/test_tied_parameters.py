from __future__ import annotations

from pathlib import Path

from golden import CheckGolden

from pipecompile.ir.program_text import parse_program
from pipecompile.passes.tied_parameters import insert_exchanges

GOLDEN = Path(__file__).parent / "golden" / "ties.txt"


def test_copies_are_refreshed_first_and_their_gradients_brought_home_last(check_golden: CheckGolden) -> None:
    check_golden(GOLDEN, lambda text: str(insert_exchanges(parse_program(text))))
