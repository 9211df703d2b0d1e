"""Announcements on the control group: the layout of a value whose elements follow on a link, or an object as a whole.

    announce    [checksum of the name, header of the layout]   [object]      the second part only for an object

They have a tag of their own, and no receives posted ahead: there is one per value and recording, and one per object.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from pipecompile.distributed.messages.mailboxes import Channel, check_name
from pipecompile.distributed.messages.message_layout import (
    HEADER_LENGTH,
    MessageLayout,
    PayloadKind,
    as_bytes,
    name_checksum,
)
from pipecompile.distributed.protocol import LAYOUT

__all__ = ["announce", "announced"]


def announce(channel: Channel, name: str, layout: MessageLayout, payload: torch.Tensor | None) -> list[dist.Work]:
    """Begin to send the layout of value `name`, and `payload` if the value is an object."""
    header = torch.tensor([name_checksum(name), *layout.to_header()], device="cpu")
    works = [channel.send(header, LAYOUT)]
    if layout.kind is PayloadKind.OBJECT and payload is not None:
        works.append(channel.send(as_bytes(payload), LAYOUT))
    return works


def announced(channel: Channel, name: str) -> tuple[MessageLayout, torch.Tensor | None]:
    """Return the next layout, with the payload of an object. Raises ConnectionError if it is not that of value `name`."""
    header = torch.empty(1 + HEADER_LENGTH, dtype=torch.int64, device="cpu")
    channel.wait(channel.receive(header, LAYOUT), name)
    checksum, *rest = header.tolist()
    check_name(checksum, name)
    layout = MessageLayout.from_header(rest)
    if layout.kind is not PayloadKind.OBJECT:
        return layout, None
    content = layout.allocate()
    channel.wait(channel.receive(as_bytes(content), LAYOUT), name)
    return layout, content
