"""What forwards saved, copied to the host and back on streams of their own: on emulated devices, under random timings and damages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pipecompile as pc
from pipecompile.driver.backend import Backend
from pipecompile.graph import backward_split as divided
from pipecompile.ir import Op
from pipecompile.passes import lower
from pipecompile.runtime.cells.offload import HostBuffer
from pipecompile.runtime.stream_events import STORE, launches
from tests.runtime.test_stream_events import COUNT, Net, outcome, piped, same, survives
from tests.support.emulated import EmulatedExecutable
from tests.support.launch_mutants import Mutant, mutants
from tests.support.stepped import SteppedStreams


def offloading(schedule: str, dispatch: str = "inline") -> tuple[EmulatedExecutable, Any, torch.Tensor]:
    """A step that offloads all cells that it can, on stepped devices, its pipeline and its input."""
    torch.manual_seed(0)
    n_devices = 4 if schedule in ("gpipe", "1f1b", "zb-h2") else 2
    given = pc.insert_offload(pc.build_schedule(schedule, 4, COUNT, n_devices=n_devices))
    x = torch.randn(8, 8)
    pipe = piped(Net(), x, schedule=given, devices=["cpu"] * n_devices, dispatch=dispatch)
    return EmulatedExecutable(pipe, COUNT, streams=SteppedStreams()), pipe, x


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dispatch", ["inline", "threads"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2", "interleaved"])
def test_any_timing_gives_what_one_thread_gives(schedule: str, dispatch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(divided.MIN_WEIGHT_FLOPS, "cpu", 0.0)
    monkeypatch.setattr(Backend, "memories", lambda _, devices, placement: range(len(devices)))
    made, pipe, x = offloading(schedule, dispatch)
    streams: Any = made.streams
    assert any(
        STORE in lane for row in launches(made.program, streams.apart) for lane in [one.lane for one in row] if lane
    )
    pipe._cache.latest.executables.pop(made.key)
    expected = outcome(pipe, x)
    pipe._cache.latest.executables[made.key] = made
    for seed in range(5):
        streams.reseed(seed)
        assert same(outcome(pipe, x), expected), seed
    assert made.n_threaded_runs == (5 if dispatch == "threads" else 0)


def test_every_wait_of_the_copies_is_needed() -> None:
    """Without it a copy to the host reads too early, a RELOAD reads what the host has not yet, or a backward what is not back.

    A RELOAD after the FREE of what the host has, or of a graph, is late by a rule: no value shows what else compute gave back before.
    """
    made, pipe, x = offloading("1f1b")
    expected = outcome(pipe, x)
    planned = launches(made.program, made.streams.apart)

    def is_of_store(mutant: Mutant) -> bool:
        lanes = [planned[d][i].lane or () for d, i in (*mutant.at, mutant.missed)]
        return any(STORE in lane for lane in lanes) and not mutant.is_implied(made.program)

    tried = set()
    for mutant in [one for one in mutants(made.program, planned) if is_of_store(one)][::23]:
        made.suffer(mutant)
        device, index = mutant.missed
        is_free = made.program.rows[device][index].op is Op.FREE
        assert is_free or not survives(made, pipe, x, expected), (mutant.kind, mutant.at, mutant.missed)
        tried.add(is_free)
    assert False in tried


def test_memory_of_the_host_is_that_of_a_few_buffers_and_serves_the_next_step() -> None:
    made, pipe, x = offloading("gpipe")
    outcome(pipe, x)
    (frame,) = made._idle[False]
    before = {key: [one.data_ptr() for one in buffer.tensors] for key, buffer in frame.host_buffers.items()}
    outcome(pipe, x)
    after = {key: [one.data_ptr() for one in buffer.tensors] for key, buffer in frame.host_buffers.items()}
    assert before == after
    assert any(before.values())
    buffer = HostBuffer()
    small, large = (buffer.copies_of([torch.arange(n, dtype=torch.uint8)]) for n in (3, 9))
    again = buffer.copies_of([torch.arange(3, dtype=torch.uint8)])
    assert [one.tolist() for one in (*small, *again)] == [[0, 1, 2]] * 2
    assert again[0].data_ptr() == large[0].data_ptr()


def test_launches_of_an_offloading_device() -> None:
    """The FREE of what the host gets waits for the copy, an action later; RELOAD waits for the copy and for all that compute did."""
    program = lower(pc.insert_offload(pc.build_schedule("gpipe", 1, 3)), overlap=True)
    (planned,) = launches(program, lambda source, target: source != target)
    found = [
        f"{launch.lane} {instruction}" + "".join(f" after {i}" for _, i in launch.waits)
        for launch, instruction in zip(planned, program.rows[0], strict=True)
    ]
    assert found[:7] == [
        "(0, 0) 0F0 -> @0.o#0[0]",
        "(0, -2) 0OFFLOAD0 @0.o#0[0] -> @0.h#0[0] after 0",
        "(0, 0) 0F1 -> @0.o#1[1]",
        "(0, -2) 0OFFLOAD1 @0.o#1[1] -> @0.h#1[1] after 2",
        "(0, 0) FREE @0.o#0[0] after 1",
        "(-2, 0) 0RELOAD0 @0.h#0[0] -> @0#0[0] after 1 after 4",
        "None FREE @0.h#0[0]",
    ]
    assert "(0, 0) 0B0 @0#0[0] -> after 5" in found
