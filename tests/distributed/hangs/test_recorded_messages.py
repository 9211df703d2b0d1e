"""The messages of rows, the links of a dump, and which message of which step a call is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipecompile.distributed.hangs.flight_dump import FlightDump, read_flight_dumps
from pipecompile.distributed.hangs.recorded_messages import copies_of, counted, links_of, row_messages
from tests.support.flight_recordings import Fault, Stop, messages_of, record
from tests.support.hand_cells import program
from tests.support.rank_programs import drawn_program


def dumps_of(folder: Path, ranks: tuple[int, ...] = (0, 1), before: int = 0) -> dict[int, FlightDump]:
    recording = record(program(), 2, Fault(Stop.HOST, 1, 1, 2))
    return read_flight_dumps(recording.write(folder, ranks=ranks, before=before))


def test_a_row_has_its_messages_and_the_departures_with_the_actions_that_use_them():
    own = program()
    assert [message.text for message in row_messages(own, 0)] == [
        "SEND h#0[0] to 1 (result of 0F0)", "SEND h#1[0] to 1 (result of 0F1)", "RECV h'1#0[0] from 1 (input of 0B0)",
        "RECV h'1#1[0] from 1 (input of 0B1)", "RECV @loss for all from 1",
    ]  # fmt: skip
    assert row_messages(own, 1)[-1].text == "SEND @loss for all (0)"


@pytest.mark.parametrize("seed", range(20))
def test_both_ends_of_a_link_have_its_messages_in_one_order(seed):
    own = drawn_program(seed).program
    rows = [row_messages(own, device) for device in range(own.n_devices)]
    for device, row in enumerate(rows):
        assert [(one.pair, one.place) for one in row] == [(one.pair, one.place) for one in messages_of(own, device)]
        for sender, receiver in {message.pair for message in row}:
            sent = [one.text.split()[1] for one in rows[sender] if one.pair == (sender, receiver)]
            received = [one.text.split()[1] for one in rows[receiver] if one.pair == (sender, receiver)]
            assert [text.partition("[")[0] for text in sent] == [text.partition("[")[0] for text in received]


def test_copies_are_the_ranks_that_links_join(tmp_path):
    dumps = dumps_of(tmp_path) | dumps_of(tmp_path, (4, 7))
    assert copies_of(dumps, 2) == [(0, 1), (4, 7)]
    assert copies_of(dumps, 3) == []


def test_positions_count_steps_from_the_opening_of_the_links(tmp_path):
    messages = counted(dumps_of(tmp_path)[0], program(), (0, 1))
    assert messages.is_in_order
    assert [messages.position((0, 1), number) for number in (2, 3, 4, 5)] == [0, 1, 5, 6]
    assert [messages.position((1, 0), number) for number in (2, 3, 4, 5)] == [2, 3, 4, 7]
    assert messages.undone((0, 1)) == 6
    assert messages.undone((1, 0)) == 5


def test_other_messages_are_noticed_by_the_order(tmp_path):
    assert not counted(dumps_of(tmp_path, before=1)[0], program(), (0, 1)).is_in_order


def test_of_links_of_one_name_those_that_were_opened_last_count(tmp_path):
    dump = dumps_of(tmp_path)[0]
    older = tuple(replace(call, group_id=0, sequence=9) for call in dump.calls)
    both = replace(dump, calls=(*older, *dump.calls))
    assert links_of(both) == links_of(dump)
