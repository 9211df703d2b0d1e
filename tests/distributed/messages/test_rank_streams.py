from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipecompile.distributed.messages import rank_streams
from pipecompile.distributed.messages.rank_streams import RankStreams
from pipecompile.ir import HOST
from pipecompile.runtime.streams import HostStream


def test_each_peer_and_direction_has_a_stream_of_its_own() -> None:
    streams = RankStreams(torch.device("cpu"), 3)
    lanes = [(0, 0), (0, 1), (1, 0), (0, 2), (2, 0)]
    assert len({id(streams.stream(lane)) for lane in lanes}) == len(lanes)
    assert all(isinstance(streams.stream(lane), HostStream) for lane in lanes)
    assert streams.stream((0, 1)) is streams.stream((0, 1))


def test_ranks_are_always_apart_and_uploads_where_there_is_a_gpu() -> None:
    for kind in ("cpu", "cuda"):
        streams = RankStreams(torch.device(kind), 2)
        assert streams.apart(0, 1)
        assert streams.apart(1, 0)
        assert streams.apart(HOST, 0) is (kind == "cuda")


def test_both_directions_are_streams_of_this_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(rank_streams, "CopyStream", lambda devices: made.append(devices) or object())
    streams, here = RankStreams(torch.device("cuda:3"), 2), (torch.device("cuda:3"),)
    for lane in ((0, 1), (1, 0), (HOST, 0)):
        streams.stream(lane)
    assert made == [here, here, here]


@pytest.mark.parametrize("ends", [True, False])
def test_a_failed_step_waits_for_the_streams_of_its_rank_alone(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, it waited for the device: for ever, where a collective lacks the rank that has failed."""
    looks: list[str] = []

    def stream(name: str) -> Any:
        return SimpleNamespace(query=lambda: looks.append(name) or (ends and looks.count(name) > 1))

    def forbidden(_: object) -> None:
        raise AssertionError("a collective runs on")

    monkeypatch.setattr(torch, "Stream", lambda _: stream("copies"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: stream("compute"))
    monkeypatch.setattr(torch.accelerator, "synchronize", forbidden)
    monkeypatch.setattr(rank_streams, "PATIENCE", 10.0 if ends else 0.01)
    streams = RankStreams(torch.device("cuda:3"), 2)
    streams.stream((0, 1))
    streams.finish()
    assert {*looks} == ({"copies", "compute"} if ends else {"copies"})


def test_a_failed_step_on_a_cpu_has_ended() -> None:
    RankStreams(torch.device("cpu"), 2).finish()
