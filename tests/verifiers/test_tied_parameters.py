from __future__ import annotations

import pytest

from pipecompile.errors import VerifyError
from pipecompile.ir import Tie
from pipecompile.ir.program_text import parse_program
from pipecompile.passes import lower
from pipecompile.schedules import build_schedule
from pipecompile.verifiers import verify

LEGAL = str(lower(build_schedule("1f1b", 2, 2), ties=(Tie("w", (0, 1), 8.0),)))


def faults(text: str) -> tuple[str, ...]:
    with pytest.raises(VerifyError) as caught:
        verify(parse_program(text))
    return caught.value.faults


def test_what_the_lowering_inserts_is_legal() -> None:
    assert LEGAL.count("BROADCAST w") == LEGAL.count("REDUCE w") == 2
    verify(parse_program(LEGAL))


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("  BROADCAST w\n", "", "device 0: BROADCAST w occurs 0 times, expected 1"),
        ("  REDUCE w\n", "  REDUCE w\n  REDUCE w\n", "device 0: REDUCE w occurs 2 times, expected 1"),
        (
            "  BROADCAST w\n",
            "  BROADCAST v\n",
            "device 0, step 0, BROADCAST v: this device has no such tie to exchange",
        ),
        ("tie w: 0 1,", "tie w: 0 0,", "tie w: 0 0, 8 bytes: two or more stages, in ascending order, each once"),
        ("tie w: 0 1,", "tie w: 1,", "tie w: 1, 8 bytes: two or more stages, in ascending order, each once"),
        ("tie w: 0 1,", "tie w: 0 7,", "tie w: 0 7, 8 bytes: there is no stage 7, stages are 0 to 1"),
        (
            "tie w: 0 1, 8 bytes",
            "tie w: 0 1, -8 bytes",
            "tie w: 0 1, -8 bytes: the size must be finite and not negative",
        ),
        ("device 0", "tie w: 0 1, 8 bytes\ndevice 0", "2 ties are called 'w'"),
    ],
)
def test_what_is_missing_or_too_much_is_named(old: str, new: str, fault: str) -> None:
    assert old in LEGAL
    assert fault in faults(LEGAL.replace(old, new, 1))


def test_an_exchange_at_the_wrong_time_is_named() -> None:
    first = "  BROADCAST w\n  0F0"
    assert first in LEGAL
    late = LEGAL.replace(first, "  0F0", 1).replace("  0F1", "  BROADCAST w\n  0F1", 1)
    assert any(fault.endswith("BROADCAST w: comes after 0F0, which uses it") for fault in faults(late))
    lines = LEGAL.splitlines(keepends=True)
    reduce, last = lines.index("  REDUCE w\n"), next(i for i, line in enumerate(lines) if line.startswith("  0B1"))
    lines.insert(last, lines.pop(reduce))
    assert any(
        fault.endswith("REDUCE w: comes before 0B1, which adds to its gradient") for fault in faults("".join(lines))
    )
