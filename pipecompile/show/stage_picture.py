"""A picture of a plan as SVG: a box per stage in the lane of its device, with an arrow for what crosses each cut.

The SVG is plain text: neither Graphviz nor matplotlib is needed. `graphviz.py` has the operations inside of the stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from pipecompile.ir import HOST
from pipecompile.ir.plan import Plan, StageSummary
from pipecompile.show.colours import COPY, FAINT, FILLS, INK
from pipecompile.text.units import BYTES, COUNT, SECONDS, counted, written

__all__ = ["StagePicture", "stage_picture"]

_WIDE, _HIGH, _GAP, _LANE, _LEFT, _TOP = 168, 74, 92, 100, 90, 12
"""Pixels: size of a box, distance of boxes, height of a lane, margins on the left and above."""
_LEVEL, _LEVELS, _PORT = 16, 12, 6
"""Pixels between the lines of two skips, the number of such lines before they are shared, pixels between their ends at a box."""
_SKIP = "#c2452d"
_WORDS = 25
"""Characters of a module name that fit a box."""


@dataclass(frozen=True, slots=True)
class StagePicture:
    """The SVG text of a picture: `str(picture)` is the text, and a notebook shows it."""

    svg: str

    def __str__(self) -> str:
        return self.svg

    def _repr_svg_(self) -> str:
        return self.svg


def stage_picture(plan: Plan) -> StagePicture:
    """Return the picture of stages, devices and routes. A value that passes over a stage is a bold line above the boxes."""
    sums = _crossings(plan)
    skips = [pair for pair in sums if pair[1] > pair[0] + 1]
    above = _TOP + _LEVEL * min(len(skips), _LEVELS)
    corners = [(_LEFT + s * (_WIDE + _GAP), above + plan.placement[s] * _LANE + 13) for s in range(plan.n_stages)]
    width, height = corners[-1][0] + _WIDE + 20, above + len(plan.devices) * _LANE
    parts = [*_head(plan, width, height, (len(sums), len(skips))), *_lanes(plan, width, above)]
    parts += map(_box, plan.stages, corners)
    for (source, consumer), nbytes in sums.items():
        ends = corners[source], corners[consumer]
        number = skips.index((source, consumer)) % _LEVELS if consumer > source + 1 else -1
        path, middle = _next_path(*ends) if number < 0 else _skip_path(*ends, number)
        parts.append(_arrow(f"stage {source} to stage {consumer}", path, middle, nbytes, is_skip=number >= 0))
    return StagePicture("\n".join([*parts, "</svg>"]) + "\n")


def _head(plan: Plan, width: int, height: int, counts: tuple[int, int]) -> Iterator[str]:
    """Yield the opening tag, the text alternative and the arrow heads. `counts` are those of pairs of stages and of skips."""
    style = f'style="max-width: 100%; background: white; font: 11px system-ui, sans-serif" fill="{INK}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" {style}>'
    stages, devices, pairs = (
        counted(number, noun)
        for number, noun in ((plan.n_stages, "stage"), (len(plan.devices), "device"), (counts[0], "pair"))
    )
    words = f"{stages} on {devices}; values cross between {pairs} of stages"
    yield f"<title>{words}, {counts[1]} of them over a stage</title>"
    yield f"<defs>{_head_mark('way', COPY)}{_head_mark('skip', _SKIP)}</defs>"


def _crossings(plan: Plan) -> dict[tuple[int, int], float]:
    """Return, per pair of a stage and a later stage that reads its values, their bytes for one micro-batch."""
    sums: dict[tuple[int, int], float] = {}
    for route in plan.routes:
        for consumer in route.consumers:
            if HOST not in (route.source, consumer):
                sums[route.source, consumer] = sums.get((route.source, consumer), 0.0) + route.nbytes
    return sums


def _head_mark(name: str, colour: str) -> str:
    size = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto" markerUnits="userSpaceOnUse"'
    return f'<marker id="pipecompile-{name}" {size}><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'


def _lanes(plan: Plan, width: int, above: int) -> Iterator[str]:
    for number, device in enumerate(plan.devices):
        y = above + number * _LANE
        yield f'<line x1="0" x2="{width}" y1="{y}" y2="{y}" stroke="{FAINT}"/>'
        yield f'<text x="8" y="{y + _LANE // 2 + 4}">{escape(f"{number} · {device}")}</text>'


def _box(row: StageSummary, corner: tuple[int, int]) -> str:
    x, y = corner
    modules = row.first if row.first == row.last else f"{row.first} … {row.last}"
    short = modules if len(modules) <= _WORDS else f"{modules[: _WORDS // 2]}…{modules[-(_WORDS // 2) :]}"
    lines = [
        short,
        f"{written(SECONDS, row.forward)} forward, {written(SECONDS, row.backward)} back",
        f"{written(COUNT, row.parameters)} parameters",
    ]
    texts = "".join(
        f'<text x="{x + 8}" y="{y + 34 + 15 * i}" font-size="10">{escape(line)}</text>' for i, line in enumerate(lines)
    )
    fill = f'fill="{FILLS[row.stage % len(FILLS)]}" stroke="#9aa0a8"'
    title = f"<title>{escape(f'stage {row.stage} on {row.device}: {modules}')}</title>"
    heading = f'<text x="{x + 8}" y="{y + 17}" font-weight="600">stage {row.stage}</text>'
    return f'<g class="stage"><rect x="{x}" y="{y}" width="{_WIDE}" height="{_HIGH}" rx="6" {fill}>{title}</rect>{heading}{texts}</g>'


_Point = tuple[int, int]


def _next_path(source: _Point, consumer: _Point) -> tuple[str, _Point]:
    """Return the line from the right side of a box to the left side of the next, and the middle of its label."""
    x1, y1, x2, y2 = source[0] + _WIDE, source[1] + _HIGH // 2, consumer[0], consumer[1] + _HIGH // 2
    bent = (x1 + x2) // 2
    return f"M{x1} {y1}C{bent} {y1} {bent} {y2} {x2} {y2}", (bent, (y1 + y2) // 2 - 5)


def _skip_path(source: _Point, consumer: _Point, number: int) -> tuple[str, _Point]:
    """Return the line above all boxes on level `number`. It goes up and down in the columns of its own two boxes."""
    x1, x2, y = source[0] + _WIDE - 12 - _PORT * number, consumer[0] + 12 + _PORT * number, _TOP + 4 + _LEVEL * number
    return f"M{x1} {source[1]}V{y}H{x2}V{consumer[1]}", ((x1 + x2) // 2, y - 4)


def _arrow(pair: str, path: str, middle: _Point, nbytes: float, *, is_skip: bool) -> str:
    colour, name, width = (_SKIP, "skip", 2.4) if is_skip else (COPY, "way", 1.4)
    size = written(BYTES, nbytes)
    text = f'<text x="{middle[0]}" y="{middle[1]}" text-anchor="middle" font-size="10" fill="{colour}">{size}</text>'
    line = f'stroke="{colour}" stroke-width="{width}" marker-end="url(#pipecompile-{name})"'
    title = f"<title>{pair}: {size} per micro-batch</title>"
    return f'<path class="{name}" d="{path}" fill="none" {line}>{title}</path>{text}'
