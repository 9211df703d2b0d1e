"""Values between devices, and between a device and the host."""

from __future__ import annotations

from queue import SimpleQueue

import pytest
import torch

from pipecompile.runtime import transport
from pipecompile.runtime.registers import Frame
from pipecompile.runtime.transport import (
    ABORT,
    Aborted,
    BlockingCopy,
    Link,
    PeerCopy,
    Upload,
    arrive,
    copy_into,
    depart,
    depart_gradient,
    link,
    receive,
    send,
    take_from,
    upload_into,
)

CPU, META = torch.device("cpu"), torch.device("meta")
GPUS = torch.device("cuda:0"), torch.device("cuda:1")


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [(CPU, CPU, Link), (GPUS[0], GPUS[0], Link), (*GPUS, PeerCopy), (CPU, GPUS[0], BlockingCopy), (GPUS[0], CPU, BlockingCopy)],
)  # fmt: skip
def test_the_link_of_two_devices(source: torch.device, target: torch.device, kind: type[Link]) -> None:
    assert type(link(source, target)) is kind


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("copied", [BlockingCopy(META).receive, PeerCopy(META).send])
def test_a_copy_is_a_leaf_that_requires_a_gradient_like_the_original(copied, requires_grad: bool) -> None:  # type: ignore[no-untyped-def]
    value = torch.ones(2, requires_grad=requires_grad) * 1
    copy = copied(value)
    assert (copy.device, copy.is_leaf, copy.requires_grad) == (META, True, requires_grad)
    assert copied(None) is None


@pytest.mark.parametrize("copied", [BlockingCopy(META).receive, PeerCopy(META).send])
def test_tensors_in_containers_are_copied(copied) -> None:  # type: ignore[no-untyped-def]
    """Between two GPUs they stayed on the first, and the second stage raised an error."""
    found = copied((torch.ones(2, requires_grad=True), {"a": [torch.ones(1), 3]}))
    assert found[0].is_meta
    assert found[0].requires_grad
    assert found[1]["a"][0].is_meta
    assert found[1]["a"][1] == 3


def test_an_upload_goes_through_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the thread that launches stood still for each copy, in the order of compute. Small copies do not wait."""
    pinned: list[torch.Size] = []

    def page_locked(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.shape)
        return tensor.clone()

    monkeypatch.setattr(transport, "page_locked", page_locked)
    large, small, there = torch.zeros(30000, requires_grad=True), torch.zeros(3), torch.zeros(30000, device=META)
    sent = Upload(META).send({"a": large, "b": [small, small, there], "c": 5})
    assert pinned == [large.shape]
    assert sent["c"] == 5
    assert sent["b"][2] is there
    assert (sent["a"].device, sent["a"].is_leaf, sent["a"].requires_grad) == (META, True, True)
    assert [one.device for one in sent["b"]] == [META] * 3


@pytest.mark.parametrize("size", [3, 40000])
def test_an_input_in_page_locked_memory_is_copied_before_the_step_returns(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that fills one such batch again and again wrote into what the GPU had not read yet."""
    given, late = torch.zeros(size), list[torch.Tensor]()
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() == given.data_ptr())
    monkeypatch.setattr(transport, "page_locked", torch.clone)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_, **__: late.append(tensor) or tensor.clone())
    Upload(META).send(given)
    given.fill_(1.0)
    assert not late[0].any()


def test_an_expanded_input_is_uploaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions and masks are often expanded. Before, torch refused to write their copy, which has the same strides."""

    def page_locked(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride()).copy_(tensor)

    monkeypatch.setattr(transport, "page_locked", page_locked)
    kept, turned = torch.zeros(1, 30000).expand(4, 30000), torch.zeros(200, 300).t()
    sent = Upload(META).send([kept, turned])
    assert [one.shape for one in sent] == [kept.shape, turned.shape]
    assert sent[1].stride() == turned.stride()


def test_an_input_that_is_there_already_is_not_kept() -> None:
    x = torch.ones(2, device=META)
    frame = Frame([None, None], [], arrivals={("x", False): [x, torch.ones(2)]})
    upload_into(1, 0, ("x", False), 0, Upload(META))(frame)
    assert frame.registers[0] is x
    assert frame.registers[1] is None
    upload_into(1, 0, ("x", False), 1, Upload(META))(frame)
    assert frame.registers[0] is frame.registers[1]
    assert frame.registers[0].is_meta


def test_a_copy_lets_go_of_the_last_tensor_of_its_buffer_first() -> None:
    frame = Frame([torch.ones(2), torch.zeros(2)], [])

    class Watching(Link):
        def send(self, value: torch.Tensor) -> torch.Tensor:
            assert frame.registers[1] is None
            return value.clone()

    copy_into(1, 0, Watching())(frame)
    assert frame.registers[1].tolist() == [1.0, 1.0]
    take_from(1, 0)(frame)
    assert frame.registers[0] is frame.registers[1]


def test_inline_a_value_passes_through_its_channel_once() -> None:
    frame, value = Frame([torch.ones(1), None], [None]), torch.ones(1)
    frame.registers[0] = value
    send(0, 0, Link(), threaded=False)(frame)
    assert frame.channels[0] is value
    receive(1, 0, Link(), threaded=False)(frame)
    assert frame.registers[1] is value
    assert frame.channels[0] is None


def test_in_threads_a_channel_is_a_queue_and_an_abort_ends_the_wait() -> None:
    frame = Frame([1, None], [SimpleQueue()])
    send(0, 0, Link(), threaded=True)(frame)
    receive(1, 0, Link(), threaded=True)(frame)
    assert frame.registers == [1, 1]
    frame.channels[0].put(ABORT)
    with pytest.raises(Aborted):
        receive(1, 0, Link(), threaded=True)(frame)


def test_inputs_arrive_on_the_device_in_containers_too() -> None:
    x = torch.ones(1)
    frame = Frame([None, None], [], arrivals={("x", False): [x], ("y", False): [{"a": x}]})
    arrive(("x", False), 0, 0, CPU)(frame)
    arrive(("y", False), 0, 1, META)(frame)
    assert frame.registers[0] is x
    assert frame.registers[1]["a"].is_meta


def test_an_output_departs_without_its_graph() -> None:
    y = torch.ones(1, requires_grad=True) * 2
    frame = Frame([y, 5], [], departures={("y", False): [None], ("n", False): [None]})
    depart(("y", False), 0, 0)(frame)
    depart(("n", False), 0, 1)(frame)
    (made,) = frame.departures["y", False]
    assert made.is_leaf
    assert made.requires_grad
    assert frame.departures["n", False] == [5]


def test_gradients_of_an_input_depart_by_consuming_stage() -> None:
    frame = Frame([torch.ones(1), None], [], departures={("x", True): [{}]})
    depart_gradient(("x", True), 0, 0, 2)(frame)
    depart_gradient(("x", True), 0, 1, 0)(frame)
    assert frame.departures["x", True] == [{2: torch.ones(1), 0: None}]
