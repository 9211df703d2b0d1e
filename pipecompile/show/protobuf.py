"""Messages in the wire format of Protocol Buffers: the part that a trace needs, without the library.

message   field after field          field   varint of (number << 3 | wire type), then its content
varint    7 bits a byte, the least significant first, the high bit set on all but the last
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["delimited", "message", "number", "packed", "text", "varint"]

_VARINT, _LENGTH = 0, 2


def varint(value: int) -> bytes:
    """Return the varint of a whole number of at least 0."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field: int, value: int) -> bytes:
    """Return a field of an int, an enum or a bool; one below 0 as the 64 bits of its two's complement."""
    return varint(field << 3 | _VARINT) + varint(value & 0xFFFF_FFFF_FFFF_FFFF)


def packed(field: int, values: Iterable[int]) -> bytes:
    """Return a repeated field of ints of at least 0; nothing if there are none."""
    content = b"".join(map(varint, values))
    return message(field, content) if content else b""


def text(field: int, value: str) -> bytes:
    """Return a field of a string."""
    return message(field, value.encode())


def message(field: int, content: bytes) -> bytes:
    """Return a field that has a message, a string or packed numbers."""
    return varint(field << 3 | _LENGTH) + delimited(content)


def delimited(content: bytes) -> bytes:
    """Return a message after its length, as files hold one after the other."""
    return varint(len(content)) + content
