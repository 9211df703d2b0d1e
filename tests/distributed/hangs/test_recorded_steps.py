"""The place of ranks in their rows, from the order of their last calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipecompile.distributed.hangs.flight_dump import read_flight_dumps
from pipecompile.distributed.hangs.recorded_messages import RankMessages, counted
from pipecompile.distributed.hangs.recorded_steps import with_steps
from tests.support.flight_recordings import Fault, Stop, record
from tests.support.rank_programs import drawn_program


def messages(folder: Path, seed: int, before: int, ring: int = 2000) -> dict[int, RankMessages]:
    program = drawn_program(seed, "1f1b").program
    recording = record(program, 4, Fault(Stop.HOST, 0, 3, 1))
    dumps = read_flight_dumps(recording.write(folder, before=before, ring=ring))
    ranks = tuple(range(program.n_devices))
    return {rank: counted(dumps[rank], program, ranks) for rank in ranks}


def places(copy: dict[int, RankMessages]) -> dict[int, list[int]]:
    """Return, per device, the indices in the row of the recorded messages."""
    return {d: [own.position(*each) % len(own.row) for each in own.order] for d, own in copy.items()}


@pytest.mark.parametrize("seed", range(6))
def test_other_messages_before_the_steps_do_not_change_the_places(tmp_path, seed):
    plain = with_steps(messages(tmp_path, seed, 0))
    shifted = with_steps(messages(tmp_path, seed, 7))
    if shifted is None:
        pytest.skip("the order fits several places")
    assert all(own.is_counted for own in plain.values())
    for device, own in places(shifted).items():
        last = len(plain[device].row)
        assert own[-last:] == places(plain)[device][-last:]
    for pair in {pair for own in shifted.values() for pair in own.first}:
        assert len({own.first[pair] for own in shifted.values() if pair in own.first}) == 1


def test_most_orders_fit_one_place(tmp_path):
    found = [with_steps(messages(tmp_path, seed, 7)) for seed in range(6)]
    assert sum(each is not None for each in found) >= 4


def test_an_order_of_no_place_is_none(tmp_path):
    copy = messages(tmp_path, 0, 0)
    own = copy[0]
    assert with_steps(copy | {0: RankMessages(0, own.row[::-1], own.calls, own.first)}) is None
