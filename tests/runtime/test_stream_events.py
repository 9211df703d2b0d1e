"""Streams proven without a GPU: on emulated devices every timing gives the numbers of one thread, and every wait is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.driver.backend import Backend
from pipecompile.graph import backward_split as divided
from pipecompile.ir import HOST, Op, Program, chain
from pipecompile.passes import lower
from pipecompile.runtime.stream_events import Place, launches, row_launches
from pipecompile.schedules import build_schedule
from tests.support.eager import square_loss
from tests.support.emulated import EmulatedExecutable
from tests.support.launch_mutants import Launches, free_earlier, mutants
from tests.support.models import UNet
from tests.support.stepped import SteppedStreams

COUNT = 4


class Turns(nn.Module):
    """Stages that hand on views of what they received, and whose gradients are views of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](x)
        for layer in self.layers[1:]:
            k = h.view(-1, 2, 2).transpose(1, 2)
            h = h + layer(k.reshape(-1, 4)).sin() + k.flatten(1)
        return h.view(-1, 2, 2) * 2


class Net(nn.Module):
    """A chain with a skip over all stages, small enough to be run a thousand times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = h = self.layers[0](x)
        for layer in self.layers[1:]:
            h = layer(h.tanh())
        return h + first


@contextmanager
def emulated(pipe: pc.Pipeline, damage: Any = None) -> Iterator[EmulatedExecutable]:
    made = EmulatedExecutable(pipe, COUNT, damage)
    try:
        yield made
    finally:
        made.streams.close()
        pipe._cache.latest.executables.pop(made.key, None)


def outcome(pipe: pc.Pipeline, x: torch.Tensor) -> list[torch.Tensor | None]:
    """The loss and all gradients of a step."""
    pipe.model.zero_grad()
    loss = pipe.step(x)
    return [loss, *(None if p.grad is None else p.grad.clone() for p in pipe.model.parameters())]


def same(one: list[torch.Tensor | None], other: list[torch.Tensor | None]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a is b is None or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def piped(model: nn.Module, x: torch.Tensor, **options: Any) -> pc.Pipeline:
    return pc.compile(
        model, 4, example_args=(x,), n_microbatches=COUNT, loss_fn=square_loss, cost="analytic",
        **({"devices": ["cpu"] * 4, "dispatch": "inline"} | options),
    )  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize(
    ("schedule", "n_devices"), [("gpipe", 4), ("1f1b", 4), ("zb-h2", 4), ("interleaved", 2), ("zbv", 2)]
)
def test_random_timings_give_what_one_thread_gives(
    schedule: str, n_devices: int, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(divided.MIN_WEIGHT_FLOPS, "cpu", 0.0)
    monkeypatch.setattr(Backend, "memories", lambda _, devices, placement: range(len(devices)))
    torch.manual_seed(0)
    model, x = UNet(depth=2, width=4).eval(), torch.randn(6, 3, 8, 8)
    pipe = piped(model, x, schedule=schedule, checkpoint=checkpoint, devices=["cpu"] * n_devices)
    expected = outcome(pipe, x)
    with emulated(pipe) as made:
        for seed in range(4):
            made.streams.reseed(seed)
            assert same(outcome(pipe, x), expected), seed


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h2", "interleaved"])
def test_in_threads_random_timings_give_what_one_thread_gives(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread per device launches on the streams of all: before, RECV waited for an event that no thread had recorded yet."""
    monkeypatch.setitem(divided.MIN_WEIGHT_FLOPS, "cpu", 0.0)
    monkeypatch.setattr(Backend, "memories", lambda _, devices, placement: range(len(devices)))
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 8)
    n_devices = 2 if schedule == "interleaved" else 4
    inline = piped(model, x, schedule=schedule, devices=["cpu"] * n_devices)
    expected = outcome(inline, x)
    pipe = piped(model, x, schedule=schedule, devices=["cpu"] * n_devices, dispatch="threads")
    with emulated(pipe) as made:
        for seed in range(10):
            made.streams.reseed(seed)
            assert same(outcome(pipe, x), expected), seed
        assert made.n_threaded_runs == 10


def test_orders_of_launches_by_seed_give_what_one_thread_gives_and_show_a_missing_wait() -> None:
    """The devices that benchmarks/emulated.py runs a thousand times: a seed draws the order in which streams and host go on."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 8)
    pipe, streams = piped(model, x, schedule="1f1b"), SteppedStreams()
    expected = outcome(pipe, x)
    made = EmulatedExecutable(pipe, COUNT, streams=streams)
    for pipe._dispatcher.choice in ("inline", "threads"):
        for seed in range(12):
            streams.reseed(seed)
            assert same(outcome(pipe, x), expected), seed
    assert (made.n_runs, made.n_threaded_runs) == (24, 12)
    assert len(streams.orders) > 12
    pipe._dispatcher.choice = "inline"
    planned = launches(made.program, streams.apart)
    removed = next(
        one for one in mutants(made.program, planned) if made.program.rows[one.at[0][0]][one.at[0][1]].op is Op.COMPUTE
    )
    made.suffer(removed)
    assert not survives(made, pipe, x, expected)


def test_between_runs_no_buffer_keeps_a_tensor() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 8)
    pipe = piped(model, x, schedule="1f1b")
    with emulated(pipe) as made:
        outcome(pipe, x)
        (frame,) = made._idle[False]
        assert frame.registers == [None] * len(frame.registers)
        assert made.n_buffers > 0


def test_a_failure_in_threads_ends_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 8)
    pipe = piped(model, x, schedule="1f1b", dispatch="threads")
    expected = outcome(pipe, x)
    with emulated(pipe) as made:

        def fail(*_: Any) -> None:
            raise RuntimeError("no more")

        with monkeypatch.context() as broken:
            broken.setattr(made.streams.stream((2, 2)), "run", fail)
            with pytest.raises(pc.RunError, match="no more"):
                pipe.step(x)
        assert same(outcome(pipe, x), expected)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_views_of_what_was_received(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(divided.MIN_WEIGHT_FLOPS, "cpu", 0.0)
    torch.manual_seed(0)
    for model, shape in (
        (Turns(), (8, 4)),
        (nn.Sequential(nn.Linear(6, 6), *(nn.Unflatten(1, (2, 3)), nn.Flatten()) * 3), (8, 6)),
    ):
        x = torch.randn(*shape)
        pipe = piped(model, x, schedule=schedule)
        expected = outcome(pipe, x)
        with emulated(pipe) as made:
            for seed in range(4):
                made.streams.reseed(seed)
                assert same(outcome(pipe, x), expected), seed


def test_without_any_one_wait_or_event_some_timing_differs() -> None:
    """What was waited for is late, and nobody waits, or waits for less: a value is read too early, or overwritten.

    Only tanh's results may be given back too early: they are part of what autograd saved, which holds them. And some waits
    follow from others, by a longer way.
    """
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 8)
    pipe = piped(model, x, schedule="1f1b")
    expected = outcome(pipe, x)
    with emulated(pipe) as made:
        planned = launches(made.program, made.streams.apart)
        seen = set()
        for mutant in list(mutants(made.program, planned))[::9]:
            made.suffer(mutant)
            harmless = survives(made, pipe, x, expected)
            is_held = all(_holds(made.program, planned, place) for place in mutant.at)
            assert harmless == (is_held or mutant.is_implied(made.program)), (
                mutant.kind,
                [str(made.program.rows[d][i]) for d, i in mutant.at],
            )
            seen.add(mutant.kind)
        assert len(seen) == 4


def _holds(program: Program, planned: Launches, place: Place) -> bool:
    """Does autograd hold what is given back there?"""
    d, i = place
    instruction = program.rows[d][i]
    what = instruction.reads[0].value if instruction.op is Op.FREE else None
    is_sent = what is not None and what.consumer is None and planned[d][i].lane == (d, d)
    return is_sent and what is not None and what.name.startswith("tanh")


def test_given_back_one_use_too_early() -> None:
    """A value that is freed before its last reader is NaN, or nothing, when that one comes."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 8)
    pipe = piped(model, x, schedule="1f1b")
    expected = outcome(pipe, x)
    tried = 0
    for row in range(4):
        for index in range(3, 40, 9):
            with emulated(pipe, free_earlier(row, index)) as made:
                if made.was_harmed:
                    tried += 1
                    assert not survives(made, pipe, x, expected), (row, index)
    assert tried > 5


def test_launches_of_a_program() -> None:
    """Two devices, one micro-batch: who runs where, and waits for whom."""
    program = lower(pc.build_schedule("gpipe", 2, 1), overlap=True)
    found = launches(program, lambda source, target: source != target)
    assert [
        [f"{launch.lane} {instruction}" + "".join(f" after {place}" for place in launch.waits) for launch, instruction in zip(*both, strict=True)]
        for both in zip(found, program.rows, strict=True)
    ] == [
        [
            "(0, 0) 0F0 -> v0#0[0] @0#0[0]",
            "(0, 1) SEND v0#0[0] to 1 after (0, 0)",
            "None RECV v0'1#0[0] from 1",
            "(0, 0) 0B0 @0#0[0] v0'1#0[0] -> after (1, 5)",
            "(0, 0) FREE v0#0[0] after (0, 1)",
            "(0, 0) FREE @0#0[0]",
            "None FREE v0'1#0[0]",
        ],
        [
            "None RECV v0#0[0] from 0",
            "(1, 1) 1F0 v0#0[0] -> @1#0[0] after (0, 1)",
            "(1, 1) 1B0 @1#0[0] -> v0'1#0[0]",
            "(1, 1) FREE @1#0[0]",
            "None FREE v0#0[0]",
            "(1, 0) SEND v0'1#0[0] to 0 after (1, 2)",
            "(1, 1) FREE v0'1#0[0] after (1, 5)",
        ],
    ]  # fmt: skip


def survives(made: Any, pipe: pc.Pipeline, x: torch.Tensor, expected: list[torch.Tensor | None]) -> bool:
    """Does a step still give what it should?"""
    try:
        return same(outcome(pipe, x), expected)
    except Exception:
        return False
    finally:
        made.streams.errors.clear()


def test_a_rank_launches_its_own_row_and_waits_for_its_own_launches_alone() -> None:
    """Sends have a stream per receiver, receives one per sender; readers wait for the receive, a FREE for the send."""
    program = lower(build_schedule("1f1b", 3, 6), chain(3), overlap=True)
    row, planned = program.rows[1], row_launches(program, 1, lambda source, _: source != HOST)
    lanes = {str(row[i]).split("#")[0]: launch.lane for i, launch in enumerate(planned) if launch.lane != (1, 1)}
    assert lanes == {
        "RECV v0": (0, 1), "SEND v1": (1, 2), "RECV v1'2": (2, 1), "SEND v0'1": (1, 0), "FREE v0": None, "FREE v1'2": None,
    }  # fmt: skip
    assert {device for launch in planned for device, _ in launch.waits} == {1}
    assert not any(launch.follows for launch in planned)
    awaited = [(row[i].op, row[before].op) for i, launch in enumerate(planned) for _, before in launch.waits]
    assert {(Op.COMPUTE, Op.RECV), (Op.SEND, Op.COMPUTE), (Op.FREE, Op.SEND), (Op.RECV, Op.COMPUTE)} == set(awaited)
    assert all(planned[before].is_awaited for launch in planned for _, before in launch.waits)
