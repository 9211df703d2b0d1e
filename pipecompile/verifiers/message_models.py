"""How messages may travel, for a program that must not deadlock.

    buffered     a send never waits; a receive waits for its send
    rendezvous   a send waits, too, until its receive is posted: the two meet
    fifo         between two devices messages arrive in the order in which they were sent, and are taken in that order

A program that is legal in all three runs on any transport: queues in one process, NCCL, gloo, MPI.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from pipecompile.errors import InputError

__all__ = ["ALL_MODELS", "MessageModel", "models_named"]


class MessageModel(Enum):
    """A model of communication."""

    BUFFERED = "buffered"
    RENDEZVOUS = "rendezvous"
    FIFO = "fifo"


ALL_MODELS = frozenset(MessageModel)


def models_named(names: Iterable[str] | str) -> frozenset[MessageModel]:
    """Raises InputError for a name that is none."""
    given = (names,) if isinstance(names, str) else tuple(names)
    known = {model.value: model for model in MessageModel}
    for name in given:
        if name not in known:
            raise InputError(f"no model of communication is called {name!r}", hint="any of " + ", ".join(known))
    return frozenset(known[name] for name in given)
