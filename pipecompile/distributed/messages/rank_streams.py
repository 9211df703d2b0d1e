"""The streams of one rank: compute, uploads from the host, and one stream per peer and direction.

compute            0F0 ■   0F1          0B0          current stream of the rank's device
to rank 1              └─► SEND v#0                  sends to rank 1, in the order of the program
from rank 1                     RECV v'1#0 ■         receives from rank 1, in the order of the program
"""

from __future__ import annotations

from time import monotonic, sleep

import torch

from pipecompile.ir import HOST
from pipecompile.runtime.streams import CopyStream, DeviceStreams, HostStream, Stream
from pipecompile.torch_private.accelerators import is_accelerator

__all__ = ["RankStreams"]

PATIENCE = 10.0
"""Seconds in which the launches of a step that failed end, unless they wait for a collective that lacks a rank."""

_POLL = 1e-3
"""Seconds between two looks at a stream."""


class RankStreams(DeviceStreams):
    """The streams that one rank launches on. On a CPU each launch is over when it returns."""

    def __init__(self, device: torch.device, size: int) -> None:
        super().__init__((device,) * size)
        self.device = device

    def apart(self, source: int, target: int) -> bool:  # noqa: ARG002 each rank has a device of its own
        """Return whether copies have a stream of their own: always between ranks, and from the host to a GPU."""
        return source != HOST or is_accelerator(self.device)

    def _copies(self, source: int, target: int) -> Stream:  # noqa: ARG002 both directions are copies on this device
        return CopyStream((self.device,)) if is_accelerator(self.device) else HostStream()

    def finish(self) -> None:
        """Return when the streams of this rank are idle, at the latest after PATIENCE seconds.

        A wait for the whole device may have no end: a collective of layers, or of copies of the pipeline, that lacks a rank runs on.
        """
        ends = [end for stream in self._lanes.values() if isinstance(stream, CopyStream) for end in stream.ends]
        if is_accelerator(self.device):
            ends.append(torch.accelerator.current_stream(self.device))
        limit = monotonic() + PATIENCE
        while not all(end.query() for end in ends) and monotonic() < limit:
            sleep(_POLL)
