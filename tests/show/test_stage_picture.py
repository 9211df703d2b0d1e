"""The picture of stages and devices: well-formed, a box per stage in the lane of its device, an arrow per pair."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree as ET

from pipecompile.ir import HOST, Route
from pipecompile.ir.plan import Plan
from pipecompile.show.stage_picture import stage_picture

SVG = "{http://www.w3.org/2000/svg}"
MEBI = 2.0**20


def drawn(plan: Plan) -> ET.Element:
    return ET.fromstring(str(stage_picture(plan)))


def test_boxes_stand_in_the_lanes_of_their_devices(plan: Plan) -> None:
    looped = replace(plan, devices=("cuda:0", "cuda:1"), placement=(0, 1, 0, 1))
    boxes = [group.find(f"{SVG}rect") for group in drawn(looped).iter(f"{SVG}g")]
    xs = [float(box.get("x", "")) for box in boxes if box is not None]
    ys = [float(box.get("y", "")) for box in boxes if box is not None]
    assert xs == sorted(set(xs))
    assert len(xs) == 4
    assert ys[0] == ys[2] < ys[1] == ys[3]


def test_values_of_a_pair_are_summed_and_skips_are_bold(plan: Plan) -> None:
    routes = (
        Route("x", HOST, (0,), MEBI, gradient=False),
        Route("a", 0, (1, 3), 3 * MEBI),
        Route("b", 0, (1,), MEBI),
        Route("c", 1, (2,), MEBI),
        Route("d", 2, (3, HOST), MEBI),
    )
    paths = [p for p in drawn(replace(plan, routes=routes)).iter(f"{SVG}path") if p.get("class")]
    told = {(p.get("class"), p.findtext(f"{SVG}title")) for p in paths}
    assert told == {
        ("way", "stage 0 to stage 1: 4.00 MiB per micro-batch"),
        ("skip", "stage 0 to stage 3: 3.00 MiB per micro-batch"),
        ("way", "stage 1 to stage 2: 1.00 MiB per micro-batch"),
        ("way", "stage 2 to stage 3: 1.00 MiB per micro-batch"),
    }


def test_names_of_the_user_are_text_and_the_picture_says_what_it_shows(plan: Plan) -> None:
    stages = (replace(plan.stages[0], first="<b>&", last="<b>&"), *plan.stages[1:])
    picture = drawn(replace(plan, stages=stages))
    assert any(text.text == "<b>&" for text in picture.iter(f"{SVG}text"))
    assert (picture.findtext(f"{SVG}title") or "").startswith("4 stages on 4 devices")
    assert stage_picture(plan)._repr_svg_() == str(stage_picture(plan))


def test_one_thing_is_in_the_singular(plan: Plan) -> None:
    routes = (Route("h", 0, (1,), 8.0),)
    two = replace(plan, n_stages=2, devices=("cpu", "cpu"), placement=(0, 1), stages=plan.stages[:2], routes=routes)
    assert "2 stages on 2 devices; values cross between 1 pair of stages, 0 of them" in str(stage_picture(two))
    one = replace(plan, n_stages=1, devices=("cpu",), placement=(0,), stages=plan.stages[:1], routes=())
    assert "1 stage on 1 device; values cross between 0 pairs of stages" in str(stage_picture(one))
