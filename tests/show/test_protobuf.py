from __future__ import annotations

import pytest

from pipecompile.show.protobuf import message, number, packed, text, varint


@pytest.mark.parametrize(
    ("value", "expected"), [(0, "00"), (127, "7f"), (128, "8001"), (300, "ac02"), (2**64 - 1, "ff" * 9 + "01")]
)
def test_a_varint_has_seven_bits_a_byte(value: int, expected: str) -> None:
    assert varint(value).hex() == expected


def test_fields_begin_with_their_number_and_wire_type() -> None:
    assert number(1, 150).hex() == "089601"
    assert number(7, -1).hex() == "38" + "ff" * 9 + "01"
    assert text(2, "testing").hex() == "120774657374696e67"
    assert packed(4, [3, 270, 86942]).hex() == "2206038e029ea705"
    assert packed(4, []) == b""
    assert message(3, number(1, 150)).hex() == "1a03089601"
