"""The steps of recorded messages, where a count from the opening of the links does not give them.

    row of rank 0      S S R S R R        S to rank 1, R from it
    last calls         ... S R R S S      end: the second S of a row, and no other place fits

An evaluation sends other messages over the same links, so a count of messages is off by a number that the dump does not have. The
last calls of a rank, as many as its row has or as are recorded, are compared with the row at every place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipecompile.distributed.hangs.recorded_messages import RankMessages
from pipecompile.distributed.messages.direct_links import Pair

__all__ = ["with_steps"]


def with_steps(copy: Mapping[int, RankMessages]) -> Mapping[int, RankMessages] | None:
    """Return the messages of a copy's devices such that positions are those of the program; None if several places fit, or none."""
    if all(messages.is_in_order for messages in copy.values()):
        return copy
    placed = {device: _placed(messages) for device, messages in copy.items()}
    if not all(placed.values()):
        return None
    return _in_common_steps({device: messages for device, messages in placed.items() if messages is not None})


def _placed(messages: RankMessages) -> RankMessages | None:
    """Return messages with the last call in step 0; None unless exactly one place in the row fits the last calls."""
    row, last = [message.pair for message in messages.row], [pair for pair, _ in messages.order]
    last = last[-len(row) :] if row else []
    ends = [end for end in range(len(row)) if all(row[end - back] == pair for back, pair in enumerate(reversed(last)))]
    if len(ends) != 1 or not last:
        return None
    first: dict[Pair, int] = {}
    for pair, calls in messages.calls.items():
        begun = sum(index <= ends[0] for index in messages.numbers(pair))
        first[pair] = max(calls) - begun + 1
    return replace(messages, first=first, is_counted=False)


def _in_common_steps(copy: Mapping[int, RankMessages]) -> dict[int, RankMessages] | None:
    """Return messages with the steps of all devices numbered alike, through the links that two of them know; None if they differ."""
    shifted: dict[int, RankMessages] = {}
    for start in copy:
        if start in shifted:
            continue
        shifted[start], open_devices = copy[start], [start]
        while open_devices:
            device = open_devices.pop()
            for other in copy.keys() - shifted.keys():
                steps = _steps_between(shifted[device], copy[other])
                if steps is not None:
                    shifted[other] = _moved(copy[other], steps)
                    open_devices.append(other)
    pairs = {pair for messages in shifted.values() for pair in messages.first}
    for pair in pairs:
        if len({messages.first[pair] for messages in shifted.values() if pair in messages.first}) > 1:
            return None
    return {device: _completed(messages, shifted) for device, messages in shifted.items()}


def _steps_between(one: RankMessages, other: RankMessages) -> int | None:
    """Return by how many steps the numbers of `other` are behind those of `one`; None without a link in common."""
    for pair in sorted(one.first.keys() & other.first.keys()):
        return (other.first[pair] - one.first[pair]) // len(one.numbers(pair))
    return None


def _moved(messages: RankMessages, steps: int) -> RankMessages:
    first = {pair: number - steps * len(messages.numbers(pair)) for pair, number in messages.first.items()}
    return replace(messages, first=first)


def _completed(messages: RankMessages, copy: Mapping[int, RankMessages]) -> RankMessages:
    """Return messages with the links that the dump has lost, as the device at the other end numbers them."""
    others = {pair: first for other in copy.values() for pair, first in other.first.items()}
    pairs = {message.pair for message in messages.row}
    return replace(messages, first={pair: others[pair] for pair in pairs & others.keys()})
