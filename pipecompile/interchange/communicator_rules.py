"""The rules by which communicators let the sends and receives of a pipeline meet.

    buffered     unlimited buffers: a send never waits, a receive waits for its send
    rendezvous   a rank stands at a send until the other has posted the receive (blocking sends)
    pair         one queue per pair of ranks and both directions: a message waits for the one before it there
    rank         one queue per rank, over all its peers: torch's default on NCCL, one communicator for the group
    lazy         as pair, and each communicator is made at its first message, where both ranks wait for one another

A rank takes its cells one after another. Sends and receives are posted when their turn comes, run beside the computations after
them, and begin after those before them. A computation waits for what it receives, WAIT_SEND for its send.
"""

from __future__ import annotations

from enum import Enum

from pipecompile.errors import InputError
from pipecompile.text.input_checks import known_names
from pipecompile.text.shown_value import shown

__all__ = ["CommunicatorRule", "rules_named"]


class CommunicatorRule(Enum):
    """A rule of communicators."""

    BUFFERED = "buffered"
    RENDEZVOUS = "rendezvous"
    PAIR = "pair"
    RANK = "rank"
    LAZY = "lazy"

    @property
    def is_queued(self) -> bool:
        """Return whether a message waits for the one before it in a queue."""
        return self in (CommunicatorRule.PAIR, CommunicatorRule.RANK, CommunicatorRule.LAZY)


def rules_named(names: object) -> tuple[CommunicatorRule, ...]:
    """Return the rules with these names, a text with commas or a sequence. Raise InputError for an unknown name."""
    parts = [part.strip() for part in names.split(",")] if isinstance(names, str) else names
    if not isinstance(parts, list | tuple) or not parts:
        raise InputError(f"rules={shown(names)} are not names of rules", hint='rules="pair,rank"')
    known = {rule.value: rule for rule in CommunicatorRule}
    known_names("rule", parts, known)
    return tuple(dict.fromkeys(known[name] for name in parts))
