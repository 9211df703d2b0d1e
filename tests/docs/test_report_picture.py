"""The picture of the report is made by its command, which photographs pages light, dark and narrow."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

from pipecompile.planning.alternatives import unit_what_if
from pipecompile.schedules import build_schedule
from pipecompile.show import report_html
from pipecompile.simulation.simulator import simulate

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def command() -> ModuleType:
    spec = importlib.util.spec_from_file_location("report_picture", DOCS / "report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def photographed(command: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Image.Image]:
    if command.browser() is None:
        pytest.skip("needs Chromium")
    folder = tmp_path_factory.mktemp("pictures")
    schedule = build_schedule("1f1b", 4, 8)
    page = folder / "report.html"
    page.write_text(
        report_html(schedule, simulate(schedule), what_if=unit_what_if(schedule), seconds=False), encoding="utf-8"
    )

    def photograph(width: int, *, dark: bool) -> Image.Image:
        picture = folder / f"{width}{dark}.png"
        command.photograph(page, picture, width, 900, dark=dark)
        return Image.open(picture).convert("RGB")

    return photograph


FORWARD = (0x8F, 0xBB, 0xEA)


@pytest.mark.parametrize(("width", "dark"), [(1600, False), (1600, True), (480, False)])
def test_a_report_is_readable_light_dark_and_narrow(
    photographed: Callable[..., Image.Image], width: int, *, dark: bool
) -> None:
    """The background has the scheme's colour, cells are filled, text stands out, and nothing touches the right margin."""
    picture = photographed(width, dark=dark)
    assert picture.size == (width, 900)
    paper, ink = ((0x16, 0x19, 0x1E), (0xE4, 0xE7, 0xEC)) if dark else ((255, 255, 255), (0x2B, 0x2F, 0x36))
    colours = {colour: count for count, colour in picture.getcolors(maxcolors=1 << 20) or ()}
    assert max(colours, key=colours.__getitem__) == paper
    assert colours[ink] > 200
    assert colours[FORWARD] > 1000
    assert {colour for _, colour in picture.crop((width - 8, 0, width, 900)).getcolors() or ()} == {paper}


def test_the_picture_of_the_documentation_has_the_width_that_its_command_gives() -> None:
    with Image.open(DOCS / "report.png") as picture:
        assert picture.size == (1240, 3300)
