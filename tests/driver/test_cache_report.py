"""The report of `pipe.explain()`: a row per recording, as data and as a table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.driver.cache_report import Recording, Recordings

ROW = Recording(
    inputs=("x: float32(B, 4)", "flag: True"),
    mode="train",
    autocast="off",
    guards=("batch_size > 2 (net.py:7)",),
    kept=("cell",),
    nodes=12,
    seconds=0.256,
    calls=34,
)


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Dropout()

    def forward(self, x: torch.Tensor, scale: Any = None, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.b(self.a(x)) if x.shape[0] > 2 else x


def recording(modes: tuple[bool, ...] = (True,), **kwargs: Any) -> Recording:
    return Recording.of(pc.trace(Branch(), torch.zeros(6, 4), **kwargs), modes, 1.5, 2)


def test_a_recording_has_shapes_with_b_for_the_batch_and_plain_values() -> None:
    row = recording(scale=2.5, mask=torch.zeros(6, 1, dtype=torch.int64))
    assert row.inputs == ("x: float32(B, 4)", "scale: 2.5", "mask: int64(B, 1)")
    assert (row.seconds, row.calls, row.kept) == (1.5, 2, ())
    assert row.nodes == 6  # three inputs, two layers, one output


def test_an_input_that_requires_gradients_is_marked() -> None:
    row = Recording.of(pc.trace(Branch(), torch.zeros(6, 4, requires_grad=True)), (True,), 0.0, 0)
    assert row.inputs == ("x: float32(B, 4), requires grad",)


def test_guards_have_the_line_of_the_user() -> None:
    (guard,) = recording().guards
    assert guard.startswith("batch_size > 2 (test_cache_report.py:")


@pytest.mark.parametrize(
    ("modes", "expected"),
    [((True, True), "train"), ((False,), "eval"), ((True, False), "train, mixed"), ((False, True), "eval, mixed")],
)
def test_the_mode_is_that_of_the_model_and_says_if_modules_differ(modes: tuple[bool, ...], expected: str) -> None:
    assert recording(modes).mode == expected


def test_autocast_names_the_device_and_the_dtype() -> None:
    assert recording().autocast == "off"
    with torch.autocast("cpu", torch.bfloat16):
        assert recording().autocast == "cpu bfloat16"


def test_the_table_has_every_field_of_every_row() -> None:
    other = replace(ROW, inputs=("y: int64(B)",), mode="eval", guards=(), nodes=99)
    text = str(Recordings((ROW, other), 16, hits=5, traces=7, evictions=3))
    assert text.startswith("2 of at most 16 recordings, last used first")
    for word in ("x: float32(B, 4)", "flag: True", "train", "off", "batch_size > 2 (net.py:7)", "cell", "12", "0.26", "34",
                 "y: int64(B)", "eval", "always", "99", "hits 5", "traces 7", "evictions 3"):  # fmt: skip
        assert word in text, word
    assert text.index("float32") < text.index("int64")


def test_a_table_without_recordings_has_its_title() -> None:
    assert "0 of at most 4 recordings" in str(Recordings((), 4, 0, 0, 0))


def test_explain_shows_what_is_kept() -> None:
    pipe = pc.compile(Branch(), 1, devices=["cpu"], n_microbatches=1, cost="analytic")
    assert "0 of at most 16" in str(pipe.explain())
    pipe(torch.randn(3, 4))
    pipe.eval()
    with torch.autocast("cpu", torch.bfloat16):
        pipe(torch.randn(4, 4, requires_grad=True))
        pipe(torch.randn(5, 4, requires_grad=True))
    last, first = pipe.explain().kept
    assert (first.inputs, first.mode, first.autocast, first.calls) == (("x: float32(B, 4)",), "train", "off", 1)
    assert (last.inputs, last.mode, last.calls) == (("x: float32(B, 4), requires grad",), "eval", 2)
    assert last.autocast == "cpu bfloat16"
    assert last.guards[0].startswith("batch_size > 2 (test_cache_report.py:")
    assert last.nodes == len(pipe.graph.graph.nodes)
    assert 0 < last.seconds < 60
    text = str(pipe.explain())
    for word in ("x: float32(B, 4)", "train", "eval", "batch_size > 2", "hits 1", "traces 2", "evictions 0"):
        assert word in text
