"""Exceptions of signal handlers that Python runs while this rank waits: they are of this rank, and no sign of a lost connection.

wait for rank 1 ... ── SIGCHLD: a worker of this rank's DataLoader was killed ──► RuntimeError out of the wait
"""

from __future__ import annotations

__all__ = ["is_from_handler"]

_OWN = ("pipecompile.", "torch.")
_HANDLERS = ("torch.utils.data.",)
"""Modules of torch whose handlers raise: that of a DataLoader, for a worker that was killed."""


def is_from_handler(error: BaseException) -> bool:
    """Return whether Python code of a signal handler raised an exception, and not torch or this package in the call that waited."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    module = "" if step is None else str(step.tb_frame.f_globals.get("__name__", ""))
    return bool(module) and (module.startswith(_HANDLERS) or not module.startswith(_OWN))
