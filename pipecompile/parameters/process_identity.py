"""The identity of a process, by which another process of its host notices that it has ended, and that of the start of all ranks."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["has_ended", "identity", "start_of_ranks"]

_START, _STATE = 19, 0
"""Places of the start time and of the state among the fields of /proc/PID/stat that follow the name of the process."""


def identity(pid: int | str = "self") -> str:
    """Return which process of which host this is, "" where the system does not say: boot, namespace, number and start time."""
    with suppress(OSError, IndexError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        number, _, rest = Path(f"/proc/{pid}/stat").read_text().partition(" ")
        fields = rest.rpartition(") ")[2].split()
        if fields[_STATE] not in "ZX":  # ended, and not collected by its parent
            return f"{boot} {Path('/proc/self/ns/pid').readlink()} {number} {fields[_START]}"
    return ""


def has_ended(process: str) -> bool:
    """Return whether a process with this `identity` has ended. False for a process of another host, and if that is not known."""
    own = identity()
    if not own or own.split()[:2] != process.split()[:2]:
        return False
    return identity(process.split()[2]) != process


def start_of_ranks() -> str:
    """Return a name, equal on all ranks, of this start of them by torchrun, whose store outlives the ranks.

    Agents count their own restarts, and none for a node that joins or leaves: the counts of several differ. There all starts have one name;
    the store is one per start, since gloo does not connect through addresses of processes that are gone.
    """
    has_one_agent = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if has_one_agent else "each"
