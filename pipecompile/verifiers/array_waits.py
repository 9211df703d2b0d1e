"""Meetings of devices by arrays: whether all rows end if every send waits for its receive, and what has to be over before a state.

device 0    S a   R b   S c          meeting 0 of device 0 is with meeting 0 of device 1 ...; each is two steps: the device comes
device 1    R a   S b   R c          to the message, which the other may await, and waits until the other has come to it
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipecompile.ir import Op
from pipecompile.ir.program_arrays import OPS, ProgramArrays, Templates

__all__ = ["Meetings", "count_meetings"]

Ints = NDArray[np.int64]


def count_meetings(numbers: Ints, templates: Templates) -> int:
    """Return the number of messages of a row from and to other devices."""
    return int(((templates.message_class >= 0) & (templates.peer >= 0))[numbers].sum())


@dataclass(frozen=True, slots=True)
class Meetings:
    """The meetings of all rows, one after the other. `starts` is where those of a device begin. `peer` and `partner` are, per meeting, the
    other device, and the number of its meeting with the same message.
    """

    starts: Ints
    peer: Ints
    partner: Ints

    @classmethod
    def of(cls, arrays: ProgramArrays, templates: Templates) -> Meetings:
        """Return the meetings of a program whose messages have one SEND and one RECV each."""
        numbers, n = arrays.numbers, len(arrays.rows)
        at = np.flatnonzero(((templates.message_class >= 0) & (templates.peer >= 0))[numbers])
        own, here = numbers[at], arrays.devices[at]
        peer, is_send = templates.peer[own], templates.op[own] == OPS[Op.SEND]
        links = np.where(is_send, here * n + peer, peer * n + here)
        keys = (links * len(templates.classes) + templates.message_class[own]) * arrays.n_microbatches
        order = np.argsort(keys + arrays.microbatches[at], kind="stable")
        partner = np.zeros(len(at), dtype=np.int64)
        partner[order[0::2]], partner[order[1::2]] = order[1::2], order[0::2]
        return cls(np.searchsorted(here, np.arange(n + 1)), peer, partner)

    def end(self) -> bool:
        """Return whether all rows come to their ends, if two devices go on only when both have come to the same message."""
        position, stop = self.starts[:-1].tolist(), self.starts[1:].tolist()
        peers, partners, ready = self.peer.tolist(), self.partner.tolist(), list(range(len(stop)))
        while ready:
            device = ready.pop()
            while (here := position[device]) < stop[device] and position[peers[here]] == partners[here]:
                position[device] += 1
                position[peers[here]] += 1
                ready.append(peers[here])
        return bool(position == stop)

    def closed(self, cut: Ints) -> Ints:
        """Return the steps of each row that are over at least, if those of `cut` are: with all that they wait for. Linear."""
        reached, done = cut.copy(), np.zeros_like(cut)
        while (over := reached // 2 - done).any():
            index = np.repeat(self.starts[:-1] + done - np.cumsum(over) + over, over) + np.arange(over.sum())
            done += over
            others = self.partner[index] - self.starts[self.peer[index]]
            np.maximum.at(reached, self.peer[index], 2 * others + 1)
        return reached
