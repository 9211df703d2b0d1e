"""Autograd as on GPUs: a backward runs on a thread of its device, not on the thread that calls it.

    caller          backward() ──────────────── waits ─────────────┐
    device thread        └─ nodes, hooks, unpacked tensors, .grad ─┘     modes of torch are those of the caller; what Python keeps
                                                                         per thread, such as threading.local, is not

A backward within a backward gets a further thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from pipecompile.torch_private import autograd_engine

__all__ = ["engine_threads"]


@contextmanager
def engine_threads() -> Iterator[set[int]]:
    """Run every backward on a thread of its own. Yield the ids of these threads, which grow with the backwards."""
    used: set[int] = set()
    places = [
        (autograd_engine, "_run_here"),
        (autograd_engine, "_engine_run_backward"),
        (torch.autograd, "_engine_run_backward"),
    ]
    patches = [patch.object(module, name, _elsewhere(getattr(module, name), used)) for module, name in places]
    for each in patches:
        each.start()
    try:
        yield used
    finally:
        for each in patches:
            each.stop()


def _elsewhere(engine: Callable[..., Any], used: set[int]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        results: list[Any] = []
        is_on, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        has_grad, threads = torch.is_grad_enabled(), torch.get_num_threads()

        def work() -> None:
            used.add(threading.get_ident())
            torch.set_num_threads(threads)
            try:
                with torch.set_grad_enabled(has_grad), torch.autocast("cpu", dtype=dtype, enabled=is_on):
                    results.append(engine(*args, **kwargs))
            except BaseException as error:
                results.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if isinstance(results[0], BaseException):
            raise results[0]
        return results[0]

    return run
