"""What a builder's docstring draws is what it builds."""

from __future__ import annotations

import importlib

import pytest
from drawn import drawn

from pipecompile.schedules import CATALOGUE, build_schedule

DRAWN = {
    "gpipe": ("gpipe", 3, 4, 3),
    "1f1b": ("one_f_one_b", 3, 4, 3),
    "eager-1f1b": ("eager_1f1b", 3, 5, 3),
    "interleaved": ("interleaved", 4, 4, 2),
    "looped-bfs": ("looped_bfs", 4, 2, 2),
    "zb-h1": ("zb_h1", 3, 5, 3),
    "zb-h2": ("zb_h2", 3, 6, 3),
    "interleaved-zb": ("interleaved_zb", 4, 4, 2),
    "zbv": ("zbv", 4, 4, 2),
    "v-half": ("v_half", 6, 5, 3),
    "v-min": ("v_min", 6, 4, 3),
    "dualpipev": ("dualpipev", 4, 5, 2),
    "sequential": ("sequential", 3, 2, 3),
    "gpipe-remat": ("gpipe_remat", 3, 4, 3),
    "ooo-backprop": ("ooo_backprop", 3, 4, 3),
    "2bp": ("two_stage_backprop", 3, 5, 3),
    "zb-1p": ("zb_1p", 3, 8, 3),
    "zb-2p": ("zb_2p", 3, 6, 3),
    "checkpoint-window": ("checkpoint_window", 4, 6, 4),
    "mario": ("mario", 3, 5, 3),
    "v-two-thirds": ("v_two_thirds", 6, 5, 3),
    "hanayo": ("hanayo", 4, 3, 2),
    "chimera": ("chimera", 2, 4, 2),
    "dualpipe": ("dualpipe", 4, 8, 4),
    "llama3": ("llama3", 4, 8, 2),
    "dualpipev-overlap": ("dualpipev_overlap", 4, 5, 2),
    "po-half": ("po_half", 4, 4, 2),
    "po-full": ("po_full", 4, 4, 2),
    "seq1f1b": ("seq1f1b", 3, 2, 3),
    "seq1f1b-interleaved": ("seq1f1b_interleaved", 4, 2, 2),
    "terapipe": ("terapipe", 3, 2, 3),
    "forward": ("forward", 3, 4, 3),
}
"""Module, stages, micro-batches and devices of the picture; 2 slices per micro-batch if there are any."""


def test_every_schedule_is_drawn() -> None:
    assert set(DRAWN) == set(CATALOGUE)


@pytest.mark.parametrize("name", DRAWN)
def test_the_picture_is_what_the_builder_gives(name: str) -> None:
    module, n_stages, n_microbatches, n_devices = DRAWN[name]
    text = importlib.import_module(f"pipecompile.schedules.{module}").__doc__ or ""
    found = [
        line.strip().split("   P = ")[0].rstrip() for line in text.splitlines() if line.strip().startswith("device ")
    ]
    slices = 2 if CATALOGUE[name].has_slices else None
    schedule = build_schedule(name, n_stages, n_microbatches, n_devices=n_devices, n_slices=slices)
    assert found[:n_devices] == drawn(schedule)
    assert f"P = {n_devices}, M = {n_microbatches}" in text
