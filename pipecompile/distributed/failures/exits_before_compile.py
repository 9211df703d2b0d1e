"""The ends of scripts that have made no pipeline, which others wait for in `compile`: a data loader, or an argument of `compile`,
has raised.

    rank 0   compile ... waits ──► "rank 1 failed before an exchange: its script has ended by ValueError: no data"
    rank 1   ValueError: no data ──► end of the interpreter: a note in the store of `init_process_group`

The note is made by every process that has imported this package and has a process group when its interpreter ends.
"""

from __future__ import annotations

import os
from contextlib import suppress
from multiprocessing.util import Finalize, register_after_fork

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from pipecompile.distributed.failures.process_end import end_of_script, note_uncaught
from pipecompile.parameters.process_identity import start_of_ranks
from pipecompile.torch_private.process_groups import default_store

__all__ = ["early_end"]

_IS_CHILD: list[bool] = []
"""Not empty in a process that was forked from a rank."""


def early_end(rank: int) -> str:
    """Return how the script of a rank has ended, as it has noted itself; "" if it has not."""
    with suppress(RuntimeError, ValueError):  # a store that is gone, or no process group
        notes = _notes()
        if notes.check([str(rank)]):
            return str(notes.get(str(rank)).decode())
    return ""


def _notes() -> PrefixStore:
    return PrefixStore(f"pipecompile/{start_of_ranks()}/ended", default_store())


def _note(error: BaseException | None = None) -> None:
    if dist.is_available() and dist.is_initialized() and not _IS_CHILD:
        with suppress(RuntimeError, ValueError):
            _notes().compare_set(str(dist.get_rank()), "", end_of_script(error))  # the first knows most


def _begin_child() -> None:
    if dist.is_initialized():
        _IS_CHILD.append(True)


Finalize(None, _note, exitpriority=0)
register_after_fork(_note, lambda note: Finalize(None, note, exitpriority=0))  # where ranks are forked
note_uncaught(_note)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)
