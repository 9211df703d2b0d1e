"""Partitions of a card, on pretended streams: a CPU does the work at once, and the streams note what ran where and in which order."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.costs import device_specs
from pipecompile.costs.device_specs import DEVICES, Links
from pipecompile.runtime import partitions
from pipecompile.runtime.green_contexts import NoPartitionsError
from pipecompile.runtime.partitions import CardPartition, PartitionStreams
from pipecompile.runtime.registers import Frame
from pipecompile.runtime.transport import CardCopy, Link
from tests.support.eager import accumulate, square_loss

CARD = torch.device("cpu")


class Stream:
    """A stream that notes all that it is told."""

    def __init__(self, device: torch.device, name: str = "copies") -> None:
        self.device, self.name, self.notes = device, name, list[Any]()

    def wait_stream(self, other: Stream) -> None:
        self.notes.append(("after", other.name))

    def wait_event(self, event: Any) -> None:
        self.notes.append(("event of", event.name))

    def record_event(self, _: Any) -> Any:
        return SimpleNamespace(name=self.name)


class Accelerator:
    """A CPU as an accelerator with a current stream."""

    def __init__(self) -> None:
        self.caller, self.of_thread = Stream(CARD, "caller"), threading.local()

    @property
    def current(self) -> Stream:
        stream: Stream = getattr(self.of_thread, "stream", self.caller)
        return stream

    def current_stream(self, _: Any = None) -> Stream:
        return self.current

    def set_stream(self, stream: Stream) -> None:
        self.of_thread.stream = stream

    def current_device_index(self) -> int:
        return 0

    def set_device_index(self, _: int) -> None:
        pass

    def synchronize(self, _: Any = None) -> None:
        pass


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    made = Accelerator()
    for name in ("current_stream", "set_stream", "current_device_index", "set_device_index", "synchronize"):
        monkeypatch.setattr(torch.accelerator, name, getattr(made, name))
    monkeypatch.setattr(torch, "Stream", Stream)
    return made


def parts(count: int, multiprocessors: int = 32) -> list[CardPartition]:
    return [CardPartition(CARD, i, count, multiprocessors, Stream(CARD, f"part {i}")) for i in range(count)]


@pytest.mark.parametrize(
    ("schedule", "dispatch", "offload"),
    [("1f1b", "inline", False), ("zb-h1", "inline", True), ("gpipe", "threads", True)],
)
def test_a_pipeline_on_partitions_has_the_gradients_of_eager(
    schedule: str, dispatch: str, offload: bool, accelerator: Accelerator
) -> None:
    torch.manual_seed(0)
    shared = nn.Linear(8, 8)
    model, x = (
        nn.Sequential(shared, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), shared, nn.Tanh(), nn.Linear(8, 4)),
        torch.randn(8, 8),
    )
    eager = nn.Sequential(*(layer for layer in model))
    expected = accumulate(eager, x, 4, square_loss)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    given = parts(3)
    pipe = pc.compile(
        model, 3, example_args=(x,), devices=given, n_microbatches=4, loss_fn=square_loss, cost="analytic", schedule=schedule, dispatch=dispatch,
        offload=offload,
    )  # fmt: skip
    for _ in range(2):
        model.zero_grad()
        torch.testing.assert_close(pipe.step(x), expected, rtol=1e-6, atol=1e-6)
        for mine, theirs in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(mine.grad, theirs, rtol=1e-5, atol=1e-6)
    assert accelerator.current.name == "caller"
    caller = [name for kind, name in accelerator.current.notes if kind == "after"]
    assert {"part 0", "part 1", "part 2", "copies"} <= set(caller), (
        "the caller's stream waits for all streams of the run"
    )
    for part in given:
        assert ("after", "caller") in part.stream.notes, "a run begins after what the caller launched before"
    tracks = {span.track for span in pipe.measured.spans}
    assert tracks == ({"compute", "to host", "from host"} if offload else {"compute"})
    assert any(note == ("event of", "copies") for note in given[1].stream.notes), (
        "part 1 waits for the copies that it reads"
    )


def test_each_cell_runs_with_the_stream_of_its_part_current(accelerator: Accelerator) -> None:
    seen: list[str] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = pc.compile(model, 2, devices=parts(2), n_microbatches=2, cost="analytic", loss_fn=square_loss)
    pipe.step(torch.randn(4, 4))
    for layer in model:
        layer.register_forward_pre_hook(lambda *_: seen.append(accelerator.current.name))
        layer.register_full_backward_hook(lambda *_: seen.append(accelerator.current.name))
    pipe.step(torch.randn(4, 4))
    assert sorted(seen) == ["part 0"] * 4 + ["part 1"] * 4


def test_parts_are_apart_and_copy_within_the_card(accelerator: Accelerator) -> None:
    streams = PartitionStreams(parts(2))
    assert streams.apart(0, 1)
    assert not streams.apart(1, 1)
    assert type(streams.link(0, 1)) is CardCopy
    assert type(streams.link(1, 1)) is Link
    value = torch.ones(2, requires_grad=True)
    copy = streams.link(0, 1).send(value)
    assert (copy.is_leaf, copy.requires_grad, copy.data_ptr() == value.data_ptr()) == (True, True, False)
    assert streams.link(0, 1).send("a label") == "a label"
    streams.fork(Frame([], []))
    streams.join()
    assert accelerator.current.notes == [], "no lane was used yet"


@pytest.mark.usefixtures("accelerator")
def test_the_simulator_knows_whether_parts_have_multiprocessors_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.randn(64, 64)
    made = {}
    for multiprocessors in (32, 0):
        pipe = pc.compile(
            model,
            4,
            example_args=(x,),
            devices=parts(4, multiprocessors),
            n_microbatches=8,
            cost="analytic",
            loss_fn=square_loss,
        )
        made[multiprocessors] = pipe._options
    own, shared = made[32], made[0]
    assert own.links.streams is None
    assert own.cost_device.flops[torch.float32] == DEVICES["cpu"].flops[torch.float32] / 4
    assert own.cost_device.bandwidth == DEVICES["cpu"].bandwidth, "parts share the memory of the card"
    assert shared.cost_device == CARD
    gpu = torch.device("cuda:0")
    monkeypatch.setattr(device_specs, "spec_for", lambda _: DEVICES["a100"])
    assert Links.of([gpu] * 4, 1e9).streams == (0, 0, 0, 0), "shared multiprocessors are one device at a time"


def test_parts_are_given_all_together_or_not_at_all() -> None:
    given = parts(2)
    for devices in ([given[0], "cpu"], [given[0], given[0]]):
        with pytest.raises(pc.InputError, match=r"(?s)devices=.*each once.*pc.partitions"):
            pc.compile(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2, devices=devices)
    with pytest.raises(pc.InputError, match="cuda_graphs=True is given together with partitions"):
        pc.compile(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2, devices=given, cuda_graphs=True)


def test_a_card_that_is_named_several_times_has_a_stream_for_each(
    monkeypatch: pytest.MonkeyPatch, accelerator: Accelerator
) -> None:
    """Before, `["cuda:0"] * 4` computed on one stream, and was simulated as four devices."""
    monkeypatch.setattr(partitions, "accelerator_indices", lambda: range(2))
    monkeypatch.setattr(partitions, "accelerator_type", lambda: "cuda")
    monkeypatch.setattr(partitions, "_STREAMS", {})
    for kept in (None, ["cuda:0"], ["cuda:0", "cuda:1"], ["cpu"] * 2, ["cuda:7"] * 2, parts(2), ["nothing"] * 2):
        assert partitions.parts_of_one_card(kept) is kept
    given = partitions.parts_of_one_card(["cuda", torch.device("cuda:0")])
    assert [(str(one.device), one.index, one.multiprocessors, one.stream) for one in given] == [
        ("cuda:0", 0, 0, None),
        ("cuda:0", 1, 0, None),
    ]
    first, second = PartitionStreams(given), PartitionStreams(given)
    assert first.computes == second.computes
    assert len(set(map(id, first.computes))) == 2
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4)
    expected = accumulate(nn.Sequential(*model), x, 2, square_loss)
    shared = [CardPartition(CARD, i, 2, 0) for i in range(2)]
    pipe = pc.compile(model, 2, devices=shared, n_microbatches=2, cost="analytic", loss_fn=square_loss)
    torch.testing.assert_close(pipe.step(x), expected, rtol=1e-6, atol=1e-6)
    assert pickle.loads(pickle.dumps(pipe))._options.partitions == tuple(shared)
    assert {key for key in partitions._STREAMS if key[0] == CARD} == {(CARD, 0), (CARD, 1)}
    assert accelerator.current.name == "caller"


def test_without_the_gpu_the_error_says_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "accelerator_indices", lambda: range(0))
    with pytest.raises(pc.InputError, match=r"(?s)there is no cuda:0 .*GPUs here: none.*\[\"cpu\"\] \* 4"):
        pc.partitions("cuda:0", 4)
    monkeypatch.setattr(partitions, "accelerator_indices", lambda: range(1))
    monkeypatch.setattr(partitions, "accelerator_type", lambda: "cuda")
    with pytest.raises(pc.InputError, match=r"no cuda:3 .*"):
        pc.partitions("cuda:3", 4)
    for wrong in ("gpu", None, 1.5):
        with pytest.raises(pc.InputError):
            pc.partitions(wrong, 4)  # type: ignore[arg-type]
    with pytest.raises(pc.InputError, match="whole number"):
        pc.partitions("cuda:0", 0)


def test_a_driver_without_parts_gives_streams_that_share_the_card(
    monkeypatch: pytest.MonkeyPatch, accelerator: Accelerator
) -> None:
    monkeypatch.setattr(partitions, "accelerator_indices", lambda: range(1))
    monkeypatch.setattr(partitions, "accelerator_type", lambda: "cuda")

    def none(*_: Any) -> Any:
        raise NoPartitionsError("the driver says 801")

    monkeypatch.setattr(partitions, "green_streams", none)
    with pytest.warns(RuntimeWarning, match="cuda:0 has no partitions: the driver says 801"):
        made = pc.partitions("cuda", 2)
    assert [(str(part), part.multiprocessors) for part in made] == [
        ("cuda:0, part 0 of 2", 0),
        ("cuda:0, part 1 of 2", 0),
    ]
    assert made[0].stream is not made[1].stream
