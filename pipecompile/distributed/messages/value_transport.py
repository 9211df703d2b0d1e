"""Transports of values from rank to rank: through the messages of the control group, or straight from device to device.

mesh of "cpu"     GlooValues      the communicator's own messages, with their tags and receives posted ahead
mesh of "cuda"    DirectValues    a communicator per directed pair, in the order of the program, on streams of their own
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, Protocol

import torch

from pipecompile.distributed.communicator import Communicator
from pipecompile.distributed.messages.direct_links import Pair
from pipecompile.runtime.streams import Streams
from pipecompile.torch_private.device_functions import to_device

__all__ = ["GlooValues", "StepState", "ValueTransport", "moved"]


class StepState(NamedTuple):
    """The state that ranks agree on before a step: `common` is to be equal on all, `own` decides the layouts of values that this
    rank sends.
    """

    common: str
    own: str


class ValueTransport(Protocol):
    """The values of the pipelines of one communicator. All calls for a pair of ranks come in the same order on both.

    `layout` is a key under which two ranks know the layout of a value once one was sent; None announces it with each value.
    """

    streams: Streams | None
    """The streams on which sends and receives are launched; None if they are over when the calls return."""

    def connect(self, pairs: Iterable[Pair]) -> None:
        """Open what messages along these pairs need. All ranks must call this together."""

    def begin(self, state: Callable[[], StepState]) -> None:
        """Begin a step. Raises PlanError unless `common` is equal on all ranks; layouts are those of the steps with such `own`."""

    def expect(self, source: int, names: Iterable[str]) -> None:
        """Append names to the values that will come from `source`, in this order."""

    def send(self, target: int, name: str, value: Any, layout: Hashable = None, *, is_gradient: bool = False) -> None:
        """Send a value, which must not change until `finish`. A gradient that is None may arrive as zeros. Raises RankLost."""

    def receive(self, source: int, name: str, layout: Hashable = None) -> Any:
        """Return the next value from `source`, on this rank's device. Raises RankLost."""

    def finish(self) -> None:
        """Return when all values are sent and received. Raises RankLost."""

    def abort(self) -> None:
        """End all messages under way, after a failure."""


class GlooValues:
    """Values as messages of the control group, through CPU memory."""

    streams: Streams | None = None

    def __init__(self, communicator: Communicator) -> None:
        self.communicator, self.device = communicator, communicator.ranks.devices[communicator.ranks.index]
        self._is_cpu = self.device.type == "cpu"

    def connect(self, pairs: Iterable[Pair]) -> None:
        """Return at once: the control group is open."""

    def begin(self, state: Callable[[], StepState]) -> None:
        """Return at once: each message carries its name, and its layout if that is new."""

    def expect(self, source: int, names: Iterable[str]) -> None:
        self.communicator.expect(source, names)

    def send(
        self,
        target: int,
        name: str,
        value: Any,
        layout: Hashable = None,  # noqa: ARG002
        *,
        is_gradient: bool = False,  # noqa: ARG002
    ) -> None:
        self.communicator.send(target, name, value)

    def receive(self, source: int, name: str, layout: Hashable = None) -> Any:  # noqa: ARG002
        value = self.communicator.receive(source, name)
        return value if self._is_cpu else moved(value, self.device)

    def finish(self) -> None:
        self.communicator.flush()

    def abort(self) -> None:
        """Return at once: the communicator breaks its own connections."""


def moved(value: Any, device: torch.device) -> Any:
    """Return a received value on `device`, still a leaf of autograd."""
    if not isinstance(value, torch.Tensor) or value.device == device:
        return value
    return to_device(value.detach(), device).requires_grad_(value.requires_grad)
