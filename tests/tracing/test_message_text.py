"""Whether an expression only makes a text to read."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from pipecompile.tracing.message_text import is_in_message


class Probe:
    """A value whose text says whether the text is a message."""

    def __format__(self, _specification: str) -> str:
        return str(is_in_message(sys._getframe(1)))


def test_what_is_printed_and_asserted_is_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    print(f"{Probe()}")
    assert capsys.readouterr().out == "True\n"
    with pytest.raises(ValueError, match="True"):
        raise ValueError(f"{Probe()}")


def test_a_key_of_a_table_is_none() -> None:
    table: dict[str, Any] = {"False": 1}
    assert table[f"{Probe()}"] == 1
