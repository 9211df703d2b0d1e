"""One card as several pipeline devices: parts of its multiprocessors, each with a stream of its own.

    pc.partitions("cuda:0", 4)      compute 0   on multiprocessors  0 to 31     0F0 ■  0F1 ...
                                    copies 0►1  anywhere                          └► SEND ■
                                    compute 1   on multiprocessors 32 to 63               └► 1F0 ...

The launch plan is that of several cards: copies between two parts go through the memory of the card, on a stream of their own. A run
forks from the stream that is current, and that stream waits for its end. Where the driver has no parts, each pipeline device still has
a stream, and all share the multiprocessors: they are simulated as one device at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pipecompile.errors import InputError
from pipecompile.ir import HOST
from pipecompile.runtime.green_contexts import NoPartitionsError, green_streams
from pipecompile.runtime.registers import Frame
from pipecompile.runtime.streams import CopyStream, DeviceStreams, Stream, StreamTask, allocated
from pipecompile.runtime.transport import CardCopy, Link
from pipecompile.text.shown_value import shown
from pipecompile.torch_private.accelerators import OnStreams, accelerator_indices, accelerator_type, is_accelerator

__all__ = ["CardPartition", "PartitionStreams", "partitions", "parts_of_one_card", "stream_of"]


@dataclass(frozen=True)
class CardPartition:
    """One of `count` parts of a card. `multiprocessors` is the number of multiprocessors of this part alone; 0 if all parts share those
    of the card.

    `stream` is None if the card was listed several times in `devices`: `stream_of(part)` then has the stream.
    """

    device: torch.device
    index: int
    count: int
    multiprocessors: int
    stream: Any = None

    def __str__(self) -> str:
        return f"{self.device}, part {self.index} of {self.count}"


def partitions(device: str | torch.device = "cuda:0", count: int = 4) -> list[CardPartition]:
    """Return `count` pipeline devices on one GPU, for `compile(devices=...)`: each with multiprocessors and a stream of its own.

    Warn where the driver has no parts; then they share the multiprocessors. Raise InputError for a GPU that does not exist.
    """
    card = _checked(device)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(
            f"count={shown(count)} is not a whole number of at least 1", hint=f'pc.partitions("{card}", 4)'
        )
    try:
        streams, each = green_streams(card, count)
    except NoPartitionsError as error:
        text = f"{card} has no partitions: {error}. The {count} pipeline devices share its multiprocessors, each with a stream of its own"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        streams, each = tuple(torch.Stream(card) for _ in range(count)), 0
    return [CardPartition(card, index, count, each, stream) for index, stream in enumerate(streams)]


_STREAMS: dict[tuple[torch.device, int], Any] = {}
"""The streams of cards that were named several times, by card and pipeline device: one for all programs, since each has memory of
its own.
"""


def stream_of(part: CardPartition) -> Any:
    """Return the stream that a part computes on."""
    if part.stream is not None:
        return part.stream
    key = part.device, part.index
    return _STREAMS.get(key) or _STREAMS.setdefault(key, torch.Stream(part.device))


def parts_of_one_card(devices: Any) -> Any:
    """Return a part per entry of `devices` if they all name one GPU that is here; other `devices` as they are."""
    if not isinstance(devices, (list, tuple)) or not all(isinstance(one, (str, torch.device)) for one in devices):
        return devices
    try:
        cards = {_checked(one) for one in devices}
    except InputError:
        return devices  # refused elsewhere, or CPUs
    if len(cards) != 1 or len(devices) == 1:
        return devices
    (card,) = cards
    return [CardPartition(card, index, len(devices), 0) for index in range(len(devices))]


def _checked(device: Any) -> torch.device:
    """Return the GPU with its index. Raise InputError unless it is there."""
    here = [f"{accelerator_type()}:{index}" for index in accelerator_indices()]
    try:
        card = torch.device(device)
        card = torch.device(card.type, card.index or 0)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        why = str(error).splitlines()[0]
        raise InputError(f"{shown(device)} is not a GPU", why=why, hint='pc.partitions("cuda:0", 4)') from None
    if str(card) not in here:
        raise InputError(
            f"there is no {card} to cut into partitions", why=f"the GPUs here: {', '.join(here) or 'none'}",
            hint=f'pc.partitions("{here[0]}", 4)' if here else 'devices=["cpu"] * 4',
        )  # fmt: skip
    return card


class PartitionStreams(DeviceStreams):
    """The streams of pipeline devices that are parts of one card."""

    def __init__(self, parts: Sequence[CardPartition]) -> None:
        super().__init__([part.device for part in parts])
        self.parts = tuple(parts)
        self.computes = tuple(map(stream_of, parts))

    @property
    def overlap(self) -> bool:
        """Whether any copies between devices run beside compute."""
        return len(self.parts) > 1

    @property
    def is_asynchronous(self) -> bool:
        """Whether any device works beside the host."""
        return True

    def apart(self, source: int, target: int) -> bool:
        """Return whether these are two different parts, or the host and a part."""
        return source != target

    def _compute(self, index: int) -> Stream:
        return _PartStream(self.computes[index])

    def _copies(self, source: int, target: int) -> Stream:  # noqa: ARG002 all copies have an end on the card
        return CopyStream([self.devices[0]])

    def link(self, source: int, target: int) -> Link:
        """Return the link from one part, or from HOST, to another."""
        return super().link(source, target) if source in (target, HOST) else CardCopy()

    def fork(self, frame: Frame) -> None:
        super().fork(frame)
        for stream in self._lanes.values():
            if isinstance(stream, _PartStream):
                stream.stream.wait_stream(torch.accelerator.current_stream(self.devices[0]))

    def join(self) -> None:
        """Let what is launched on the current stream from now on begin after the run."""
        current = torch.accelerator.current_stream(self.devices[0])
        for stream in self._lanes.values():
            for end in stream.ends if isinstance(stream, CopyStream) else (stream.stream,):  # type: ignore[attr-defined]
                current.wait_stream(end)
        super().join()

    def release(self, index: int) -> Callable[[torch.Tensor], None]:
        """Return a function after which the memory of a tensor, once free, is reused when the compute of part `index` is over."""
        stream = self.computes[index]
        return lambda tensor: tensor.record_stream(stream) if is_accelerator(tensor.device) else None

    def allocator(self, index: int) -> Callable[[int], torch.Tensor]:
        """Return a function that allocates bytes in memory of the compute of part `index`."""
        return partial(allocated, stream=self.computes[index])


class _PartStream:
    """The stream of a part, current for what it runs."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def run(self, task: StreamTask, frame: Frame) -> None:
        with OnStreams(self.stream):
            task.run(frame)

    def record(self, event: Any) -> Any:
        return self.stream.record_event(event)

    def wait(self, event: Any) -> None:
        self.stream.wait_event(event)
