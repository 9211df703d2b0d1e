"""The models of communication in which a program must not deadlock.

    buffered     a send never waits; a receive waits for its send
    rendezvous   a send waits until its receive is posted, and the receive for its send
    fifo         messages between two devices arrive and are received in the order in which they were sent

A program that is legal in all three runs on any transport: queues in one process, NCCL, gloo, MPI.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from pipecompile.errors import InputError
from pipecompile.text.shown_value import shown

__all__ = ["ALL_MODELS", "MessageModel", "models_named"]


class MessageModel(Enum):
    """A model of communication."""

    BUFFERED = "buffered"
    RENDEZVOUS = "rendezvous"
    FIFO = "fifo"


ALL_MODELS = frozenset(MessageModel)


def models_named(names: Iterable[str] | str) -> frozenset[MessageModel]:
    """Return the models with these names. Raise InputError for an unknown name."""
    known = {model.value: model for model in MessageModel}
    requested = tuple(names) if isinstance(names, list | tuple | set | frozenset) else (names,)
    for name in requested:
        if not isinstance(name, str) or name not in known:
            raise InputError(
                f"no model of communication is called {shown(name)}", hint="pass any of " + ", ".join(known)
            )
    return frozenset(known[name] for name in requested)
