"""What another thread changes while a loss is tried, or a model is recorded, stays as that thread left it."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.tracing.state.function_state import function_restored
from pipecompile.tracing.state.shared_objects import is_shared


class Jobs:
    """A queue of a user, guarded by a lock, as workers have."""

    def __init__(self) -> None:
        self.lock, self.waiting, self.done = threading.RLock(), deque(range(4)), list[int]()

    def take(self) -> None:
        with self.lock:
            self.done.append(self.waiting.popleft())


class Logger:
    """An object that leads to a queue, and counts by itself."""

    def __init__(self) -> None:
        self.jobs, self.calls = Jobs(), 0


LOGGER = Logger()


def logged(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    LOGGER.calls += 1
    return nn.functional.mse_loss(y, t)


@pytest.fixture
def other_thread() -> Iterator[None]:
    """A thread that runs beside the test."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    yield
    end.set()
    thread.join()


@pytest.mark.usefixtures("other_thread")
def test_objects_with_locks_threads_and_queues_are_shared() -> None:
    class Holds:
        def __init__(self, value: object) -> None:
            self.value = value

    signs = [threading.Lock(), threading.RLock(), threading.Event(), threading.Thread(), queue.Queue(), queue.SimpleQueue()]  # fmt: skip
    assert all(is_shared(Holds(one)) for one in signs)
    assert not any(is_shared(one) for one in (Holds(3), 3, [threading.Lock()], nn.Linear(1, 1), Holds))


def test_without_other_threads_all_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys._current_frames", lambda: {1: None})
    LOGGER.__init__()  # type: ignore[misc]
    assert not is_shared(LOGGER.jobs)
    with function_restored(logged):
        LOGGER.jobs.take()
        LOGGER.calls += 1
    assert (LOGGER.jobs.done, LOGGER.calls) == ([], 0)


@pytest.mark.usefixtures("other_thread")
def test_what_a_thread_took_does_not_come_back() -> None:
    LOGGER.__init__()  # type: ignore[misc]
    with function_restored(logged):
        thread = threading.Thread(target=LOGGER.jobs.take)
        thread.start()
        thread.join()
        LOGGER.calls += 1
    assert (list(LOGGER.jobs.waiting), LOGGER.jobs.done, LOGGER.calls) == ([1, 2, 3], [0], 0)


class Reporting(nn.Module):
    """A model with a queue of jobs that another thread takes from while it is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.logger = nn.Linear(4, 4), nn.Linear(4, 4), Logger()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=self.logger.jobs.take)
        thread.start()
        thread.join()
        self.calls += 1
        return self.b(self.a(x).tanh())


@pytest.mark.usefixtures("other_thread")
def test_a_recording_leaves_the_queue_of_a_model_to_its_threads() -> None:
    model = Reporting()
    x = torch.randn(4, 4)
    pc.trace(model, x)
    jobs = model.logger.jobs
    assert jobs.done
    assert jobs.done + list(jobs.waiting) == [0, 1, 2, 3]
    assert model.calls == 0
