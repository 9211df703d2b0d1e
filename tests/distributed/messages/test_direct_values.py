"""Values that go straight from rank to rank; ranks are threads, and gloo stands in for NCCL."""

from __future__ import annotations

from collections.abc import Callable
from time import sleep
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch

from pipecompile.distributed.failures.failure_report import FailureReport, RankLost
from pipecompile.distributed.messages import direct_values
from pipecompile.distributed.messages.direct_values import DirectValues
from pipecompile.distributed.messages.message_layout import encode
from pipecompile.distributed.messages.value_transport import StepState
from pipecompile.errors import InputError, PipecompileError, PlanError
from tests.distributed.rank_threads import ThreadCommunicator, run_communicators


def on_ranks(function: Callable[[DirectValues], Any], size: int = 2) -> list[Any]:
    """Return what `function` returns on each rank, all links open and a step begun."""

    def run(communicator: ThreadCommunicator) -> Any:
        communicator.connect()
        values = DirectValues(communicator)
        values.connect([(source, target) for source in range(size) for target in range(size) if source != target])
        values.begin(lambda: StepState("a step", ""))
        result = function(values)
        values.finish()
        return result

    return run_communicators(size, run)


def sent(*messages: tuple[Any, Any]) -> tuple[list[Any], list[int]]:
    """Send values with their layout keys from rank 0. Return what arrives, and the announcements that were made by each message."""

    def run(values: DirectValues) -> Any:
        if values.index == 0:
            counts = []
            for value, key in messages:
                before = len(values.announcements)
                values.send(1, "v", value, key)
                counts.append(len(values.announcements) - before)
            return counts
        return [values.receive(0, "v", key) for _, key in messages]

    counts, arrived = on_ranks(run)
    return arrived, counts


VALUES = {
    "plain": torch.randn(3, 4),
    "a leaf with a gradient": torch.randn(5, requires_grad=True),
    "transposed": torch.randn(3, 4).t(),
    "not dense": torch.randn(6, 8)[::2, ::2],
    "expanded": torch.randn(3, 1).expand(3, 4),
    "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    "half": torch.randn(4).bfloat16(),
    "integers": torch.arange(7),
    "flags": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "nothing": None,
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_value_arrives_as_it_is_and_is_announced_once(value: torch.Tensor | None) -> None:
    arrived, counts = sent((value, "key"), (value, "key"), (value, "key"))
    assert counts == ([1, 1, 1] if value is None else [1, 0, 0])
    for found in arrived:
        if value is None:
            assert found is None
            continue
        assert torch.equal(found, value.detach())
        assert (found.dtype, found.requires_grad, found.is_leaf) == (value.dtype, value.requires_grad, True)
        assert found.stride() == encode(value)[0].strides


def test_a_layout_that_the_recording_does_not_fix_is_announced_with_each_value() -> None:
    parts = [torch.randn(size, 2) for size in (3, 1, 0, 4)]
    arrived, counts = sent(*((part, None) for part in parts))
    assert counts == [1, 1, 1, 1]
    assert all(map(torch.equal, arrived, parts))


def test_an_object_goes_over_the_control_group_each_time() -> None:
    arrived, counts = sent(({"n": 3}, "key"), (("a", torch.ones(2)), "key"))
    assert counts == [2, 2]
    assert arrived[0] == {"n": 3}
    assert torch.equal(arrived[1][1], torch.ones(2))


def test_other_strides_than_agreed_are_copied() -> None:
    arrived, counts = sent((torch.zeros(3, 4), "key"), (turned := torch.randn(4, 3).t(), "key"))
    assert counts == [1, 0]
    assert torch.equal(arrived[1], turned)
    assert arrived[1].stride() == (4, 1)


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (torch.zeros(4), r"v is torch.float32 \(4,\), and was torch.float32 \(3,\) in a step before"),
        (torch.zeros(3, dtype=torch.int64), "v is torch.int64"),
        (torch.zeros(3, requires_grad=True), "with a gradient, and was"),
        (None, "v is None, and was"),
        ([1], "v is an object, and was"),
    ],
)
def test_another_layout_than_agreed_is_refused_by_its_sender(second: Any, text: str) -> None:
    """Never silent: the receiver has begun to receive so many bytes of that type."""

    def run(values: DirectValues) -> None:
        if values.index == 1:
            values.receive(0, "v", "key")
            return
        values.send(1, "v", torch.zeros(3), "key")
        with pytest.raises(PlanError, match=text) as caught:
            values.send(1, "v", second, "key")
        assert "keep_together=" in caught.value.hint

    on_ranks(run)


def test_a_gradient_that_is_none_arrives_as_zeros_once_its_layout_is_known() -> None:
    """A micro-batch of which all labels are ignored has no backward of its loss: the step failed."""
    gradients = None, torch.ones(3), None

    def run(values: DirectValues) -> Any:
        if values.index == 1:
            return [values.receive(0, "g", "key") for _ in gradients]
        for gradient in gradients:
            values.send(1, "g", gradient, "key", is_gradient=True)
        return None

    first, second, third = on_ranks(run)[1]
    assert first is None
    assert (second.tolist(), third.tolist()) == ([1.0] * 3, [0.0] * 3)


def test_each_receiver_is_told_a_layout() -> None:
    """Before, the second receiver waited for a layout that its sender took for known: ranks 1 and 2, for the loss."""

    def run(values: DirectValues) -> Any:
        if values.index == 0:
            for peer in (1, 2, 1, 2):
                values.send(peer, "v", torch.ones(2), "key")
            return values.receive(2, "v", "key").tolist()
        arrived = [values.receive(0, "v", "key").tolist() for _ in range(2)]
        if values.index == 2:
            values.send(0, "v", torch.zeros(3), "key")
        return arrived

    assert on_ranks(run, 3) == [[0.0] * 3, [[1.0] * 2] * 2, [[1.0] * 2] * 2]


def test_layouts_belong_to_the_steps_in_which_all_ranks_are_as_they_were() -> None:
    """A layer that is frozen between two steps changes what has a gradient: its values are announced again, then not."""

    def run(values: DirectValues) -> list[int]:
        counts = []
        for flags in ("1", "1", "0", "0", "1"):
            own = flags if values.index == 0 else ""
            values.begin(lambda own=own: StepState("a step", own))
            before = len(values.announcements)
            if values.index == 0:
                values.send(1, "v", torch.zeros(2, requires_grad=flags == "1"), "key")
            else:
                assert values.receive(0, "v", "key").requires_grad is (flags == "1")
            counts.append(len(values.announcements) - before)
        return counts

    assert on_ranks(run)[0] == [1, 0, 1, 0, 0]


def test_a_value_of_another_name_is_noticed_when_it_is_announced() -> None:
    def run(values: DirectValues) -> None:
        if values.index == 0:
            values.send(1, "v", torch.zeros(2))
        else:
            with pytest.raises(RankLost, match="not in the same step"):
                values.receive(0, "w")

    with pytest.raises(RankLost):  # the elements of `v` are never received
        on_ranks(run)


def test_ranks_on_one_gpu_are_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's own error names no cause. It comes of a script without `torch.cuda.set_device`."""
    monkeypatch.setattr(direct_values, "device_identity", lambda _: "H100, GPU-1")

    def run(communicator: ThreadCommunicator) -> PipecompileError:
        communicator.connect()
        with pytest.raises(InputError, match="ranks 10, 11 use the same GPU") as caught:
            DirectValues(communicator).connect([(0, 1)])
        return caught.value

    assert all("LOCAL_RANK" in error.hint for error in run_communicators(2, run))


class Launching:
    """A stream of a GPU that makes an event for each record, and a message of NCCL, whose work holds its tensor."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def record_event(self, event: Any) -> Any:
        self.made.append(event or SimpleNamespace(query=lambda: True))
        return self.made[-1]


def values_on_a_gpu(communicator: Any) -> DirectValues:
    values = DirectValues.__new__(DirectValues)
    values.device, values.communicator, values.events = torch.device("cuda:0"), communicator, []
    values.pending, values.announcements = direct_values.deque(), direct_values.deque()
    return values


def test_the_host_waits_for_what_a_gpu_receives_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages on a GPU end without the host: each is polled, in the order of launching."""
    over: list[str] = []
    polled: list[tuple[int, str]] = []
    stream = Launching()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: stream)

    def poll(peer: int, name: str, is_over: Callable[[], bool]) -> None:
        polled.append((peer, name))
        assert is_over()

    values = values_on_a_gpu(SimpleNamespace(poll=poll, check_verdict=lambda: None, flush=lambda: over.append("flush")))
    for _ in range(2):
        for peer, name in ((1, "v#0"), (2, "w#0")):
            values._launched(peer, name, SimpleNamespace(wait=lambda: over.append("stream")))  # type: ignore[arg-type]
        assert over[-2:] == ["stream", "stream"]  # the streams wait; the host has not
        values.finish()
        assert polled[-2:] == [(1, "v#0"), (2, "w#0")]
        assert over[-1] == "flush"
    assert stream.made[:2] == stream.made[:1:-1], "the second step records the same events"


def test_a_message_that_is_launched_does_not_hold_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the works of a step held all that it sent and received until its end, for each micro-batch anew."""
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: Launching())
    values, part = values_on_a_gpu(None), torch.zeros(3)
    memory = ref(part)
    values._launched(1, "v#0", SimpleNamespace(wait=lambda: None, outputs=[part]))  # type: ignore[arg-type]
    del part
    assert len(values.pending) == 1
    assert memory() is None


def test_links_are_closed_with_the_values_or_at_the_end_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr(direct_values, "close_links", lambda links: closed.append(len(links)))

    def run(communicator: ThreadCommunicator) -> None:
        communicator.connect()
        values = DirectValues(communicator)
        values.connect([(0, 1), (1, 0)])
        communicator.breakers.clear()

    run_communicators(2, run)
    assert closed == [2, 2]


def test_a_failure_elsewhere_ends_what_is_launched_though_the_host_waits_for_no_message() -> None:
    """A cell that reads a number from its GPU waits there for a message that never comes: NCCL is to be aborted meanwhile."""

    def run(communicator: ThreadCommunicator) -> str:
        communicator.connect()
        values = DirectValues(communicator)
        values.connect([(0, 1)])
        values.begin(lambda: StepState("a step", ""))
        if values.index == 0:
            communicator.board.post_failure(FailureReport(10, "the data are wrong"))
            return ""
        while values.links:  # the thread that checks the board breaks them
            sleep(0.01)
        with pytest.raises(RankLost, match="the data are wrong"):
            values.receive(0, "v")
        with pytest.raises(RankLost, match="the data are wrong"):
            values.finish()
        return "raised"

    assert run_communicators(2, run) == ["", "raised"]
