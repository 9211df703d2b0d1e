from __future__ import annotations

from pipecompile.ir import chain
from pipecompile.schedules.search.catalogue_candidates import catalogue_candidates


def names(n_stages: int, n_devices: int, *, split: bool = True) -> set[str]:
    return {each.name for each in catalogue_candidates(n_stages, 8, n_devices, chain(n_stages), split=split)}


def test_all_schedules_that_only_compute_are_compared() -> None:
    assert {"1f1b", "zb-h2", "2bp", "zb-1p", "ooo-backprop", "sequential"} <= names(3, 3)
    assert {"v-two-thirds", "hanayo", "zbv", "looped-bfs"} <= names(6, 3)
    assert "hanayo" in names(9, 3)


def test_recomputation_offloading_overlaps_and_forwards_alone_are_left_out() -> None:
    left_out = {"gpipe-remat", "mario", "checkpoint-window", "po-half", "po-full", "dualpipev-overlap", "forward"}
    assert not left_out & (names(3, 3) | names(6, 3))


def test_split_backwards_can_be_left_out() -> None:
    assert {"1f1b", "gpipe"} <= names(3, 3, split=False)
    assert not {"zb-h1", "2bp"} & names(3, 3, split=False)
