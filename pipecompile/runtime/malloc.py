"""The C library's heap, told to serve training on CPUs: one heap for all threads, and freed memory stays at hand.

    as it comes     a thread's heap of 64 MiB is given back when it is empty: a step of ResNet-18 in two threads faults
                    110,000 pages in anew, and takes 290 ms
    as set here     none after the first step, which takes 190 to 200 ms, with less memory resident

The same holds for what is measured: times of nodes are those of a step only if both find memory in the same way. The
setting is the process's and stays. It is left alone where the user has made one (any variable `MALLOC_...`), and where
the C library is not glibc.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

__all__ = ["keep_freed_memory"]

_SETTINGS = (
    (-8, 1),  # M_ARENA_MAX: threads that start from now on share the main heap
    (-3, 32 << 20),  # M_MMAP_THRESHOLD, the most there is: what is smaller comes from the heap
    (-1, 512 << 20),  # M_TRIM_THRESHOLD: so much freed memory stays at the heap's end
)


@cache
def keep_freed_memory() -> bool:
    """Set the heap up, once in a process. Is it set up by us?"""
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    library = ctypes.CDLL(None)
    return all(library.mallopt(ctypes.c_int(name), ctypes.c_int(value)) for name, value in _SETTINGS)
