from __future__ import annotations

import pytest

from pipecompile.errors import InputError
from pipecompile.schedules import CATALOGUE
from pipecompile.schedules.search.search_arguments import memory_bound, placements_to_try


def test_a_loop_and_for_two_stages_on_a_device_a_v_are_tried():
    assert placements_to_try(4, None, None) == ((0, 1, 2, 3),)
    assert placements_to_try(4, 2, None) == ((0, 1, 0, 1), (0, 1, 1, 0))
    assert placements_to_try(5, 2, None) == ((0, 1, 0, 1, 0),)
    assert placements_to_try(3, 1, [0, 0, 0]) == ((0, 0, 0),)


@pytest.mark.parametrize("placement", [[0, 2, 1, 4], [0, 1], "0123", 5, [0.0, 1, 0, 1]])
def test_a_placement_has_a_device_for_each_stage(placement):
    with pytest.raises(InputError, match="no device for each of 4 stages"):
        placements_to_try(4, None, placement)


def test_a_bound_is_of_one_kind():
    assert memory_bound(None, None, 2) is None
    assert memory_bound(None, 3, 2).capacity == (3.0, 3.0)
    assert not memory_bound(None, 3, 2).in_bytes
    assert memory_bound([10, 20], None, 2).in_bytes
    with pytest.raises(InputError, match="cannot both be given"):
        memory_bound(1, 1, 2)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_every_placement_of_the_catalogue_is_tried(chunks, devices):
    """With three stages per device the waves of Hanayo were left out."""
    n_stages = chunks * devices
    entries = [entry for entry in CATALOGUE.values() if entry.suits(n_stages, devices)]
    placements = {entry.build(n_stages, 2 * devices, devices).placement for entry in entries}
    assert placements == set(placements_to_try(n_stages, devices, None))
