"""The thread pool of torch in a forked process: it is created again before several threads of autograd need it at once.

parent   pool ── fork ──► child   the pool is marked as lost, and the first thread that asks for it makes another
                                  autograd starts a thread per device, and all ask at once: some find none, or half of one

A recording on fake tensors gives torch eight devices (seen with 2.14): without this the child ends by SIGABRT or SIGSEGV. torch renews
the pool itself after a fork, unless the thread that forked has asked for the number of threads before.
"""

from __future__ import annotations

import os
from threading import Thread

import torch

__all__ = ["renew_pool"]

_renewed_in = [0]
"""The process that has renewed the pool."""


def renew_pool() -> None:
    """Create the thread pool of torch again if it was lost, once in a process.

    A new thread reads the number of threads, since torch checks the pool at the first such read of a thread.
    """
    if _renewed_in[0] != os.getpid():
        _renewed_in[0] = os.getpid()
        asking = Thread(target=torch.get_num_threads, name="pipecompile-pool")
        asking.start()
        asking.join()
