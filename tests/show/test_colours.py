"""Every kind of action has four shades, and stages on one device are told apart by shade."""

from __future__ import annotations

import re

from pipecompile.ir import Kind
from pipecompile.show.colours import COPY, FAINT, FILLS, INK, SHADES


def test_every_kind_has_four_shades_from_light_to_dark() -> None:
    assert set(SHADES) == set(Kind)
    for shades in SHADES.values():
        levels = [sum(bytes.fromhex(shade[1:])) for shade in shades]
        assert len(levels) == 4
        assert levels == sorted(levels, reverse=True)


def test_no_colour_occurs_twice_and_all_are_hexadecimal() -> None:
    colours = [*FILLS, COPY, INK, FAINT, *(shade for shades in SHADES.values() for shade in shades)]
    assert len(set(colours)) == len(colours)
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)
