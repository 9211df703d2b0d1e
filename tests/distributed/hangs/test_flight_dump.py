"""Dumps of torch itself are read, and files that are none are refused with their name."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.distributed.hangs.flight_dump import CallState, read_flight_dump, read_flight_dumps
from pipecompile.distributed.hangs.pending_collectives import pending_collectives
from pipecompile.errors import InputError
from tests.support.flight_recordings import entry


def data(**changes) -> dict:
    own = entry((0, 1), (0, 1), 0, 3, 64, True, "started") | changes
    own.pop("ranks")
    return {"version": "2.10", "pg_config": {"g": {"ranks": "[0, 1]"}}, "entries": [own]}


def written(folder: Path, value: object, name: str = "nccl_trace_rank_3") -> Path:
    path = folder / name
    path.write_bytes(value if isinstance(value, bytes) else pickle.dumps(value, 2))
    return path


def test_an_entry_is_read(tmp_path):
    dump = read_flight_dump(written(tmp_path, data()))
    (call,) = dump.calls
    assert (dump.rank, dump.members, dump.has_starts) == (3, {"g": (0, 1)}, True)
    assert (call.group, call.sequence, call.nbytes, call.is_message) == ("pipecompile link 0-1", 3, 64, True)
    assert (call.state, call.is_over, call.line) == (CallState.STARTED, False, "direct_links.py:51")


def test_json_gives_the_same(tmp_path):
    one = read_flight_dump(written(tmp_path, data()))
    assert read_flight_dump(written(tmp_path, json.dumps(data()).encode(), "rank_3.json")) == one


def test_a_folder_stands_for_its_files(tmp_path):
    written(tmp_path, data(), "trace_1")
    written(tmp_path, data(), "trace_0")
    assert [*read_flight_dumps([tmp_path])] == [0, 1]
    with pytest.raises(InputError, match="two dumps are of rank 1"):
        read_flight_dumps([tmp_path, tmp_path / "trace_1"])
    with pytest.raises(InputError, match="no dump"):
        read_flight_dumps([])


def test_nccl_retires_what_has_timed_out_and_gloo_what_is_over(tmp_path):
    (call,) = read_flight_dump(written(tmp_path, data(retired=True, state="scheduled"))).calls
    assert not call.is_over
    gloo = data(retired=True, state="scheduled", profiling_name="gloo:all_reduce", is_p2p=False)
    (call,) = read_flight_dump(written(tmp_path, gloo)).calls
    assert call.is_over


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "is not a dump"),
        (b"nothing", "is not a dump"),
        (b"{", "is not a dump"),
        (b"[" * 100_000, "is not a dump"),
        ([], "no list of entries"),
        ({"version": "2.10"}, "no list of entries"),
        ({"version": "3.0", "entries": []}, "version is '3.0'"),
        ({"version": 2, "entries": []}, "version is 2"),
        ({"version": "2.10", "entries": [1]}, "an entry is 1"),
        (data(state="gone"), "a state is 'gone'"),
        (data(p2p_seq_id=-1), "p2p_seq_id is -1"),
        (data(record_id=1 << 70), "record_id is"),
        (data(process_group="0"), "process_group is '0'"),
        (data(profiling_name=None), "profiling_name is None"),
        (Random(0).randbytes(1000), "is not a dump"),
    ],
)
def test_files_that_are_no_dumps_are_refused_with_their_name(tmp_path, value, reason):
    path = written(tmp_path, value)
    with pytest.raises(InputError, match=reason) as caught:
        read_flight_dump(path)
    assert str(path) in str(caught.value)


def test_names_and_places_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(InputError, match="has no rank"):
        read_flight_dump(written(tmp_path, data(), "trace"))
    with pytest.raises(InputError, match="cannot be read"):
        read_flight_dump(tmp_path / "trace_7")


WHOLE = pickle.dumps(data(), 2)


@settings(max_examples=200)
@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255), st.booleans())
def test_damaged_dumps_are_read_or_refused_soon(tmp_path_factory, place, byte, is_cut):
    content = WHOLE[:place] if is_cut else WHOLE[:place] + bytes([byte]) + WHOLE[place + 1 :]
    path = written(tmp_path_factory.mktemp("damaged"), content)
    begin = time.process_time()
    with suppress(InputError):
        read_flight_dump(path)
    assert time.process_time() - begin < 1


def test_a_collective_of_gloo_that_one_of_two_processes_has_not_launched(tmp_path):
    """The recorder of torch has collectives of gloo, and none of its messages."""
    code = "import sys; from tests.support.flight_recordings import record_gloo; record_gloo(int(sys.argv[1]), sys.argv[2])"
    commands = [[sys.executable, "-c", code, str(rank), str(tmp_path)] for rank in (0, 1)]
    processes = [subprocess.Popen(command, cwd=Path(__file__).parents[3]) for command in commands]
    assert [process.wait(60) for process in processes] == [0, 0]
    for ending in ("", ".json"):
        dumps = read_flight_dumps([tmp_path / f"dump_{rank}{ending}" for rank in (0, 1)])
        assert [len(dumps[rank].calls) for rank in (0, 1)] == [3, 2]
        (pending,) = pending_collectives(dumps)
        assert (pending.names, pending.launched, pending.missing) == (("gloo:all_reduce",), (0,), (1,))
        assert pending.sequence == max(call.sequence for call in dumps[0].calls)
