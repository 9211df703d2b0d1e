"""Objects that other threads change meanwhile: a queue with a worker thread behind it, a meter that a monitor reads.

Such an object cannot be restored: what another thread put in would be lost, what it took out would come back.
"""

from __future__ import annotations

import queue
import sys
import threading
from typing import Any

from torch import nn

from pipecompile.tracing.container_items import attributes_in

__all__ = ["is_shared"]

_SIGNS = (
    *(type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event, threading.Semaphore),
    *(threading.Barrier, threading.Thread, queue.Queue, queue.SimpleQueue),
)


def is_shared(value: Any) -> bool:
    """Return whether other threads run, and an object has a lock, a thread or a queue among its attributes. A module never is."""
    if isinstance(value, nn.Module) or len(sys._current_frames()) == 1:
        return False
    attributes = attributes_in(value)
    return isinstance(attributes, dict) and any(isinstance(one, _SIGNS) for one in attributes.copy().values())
