from __future__ import annotations

import gc
from threading import Event, Thread
from time import monotonic, sleep
from typing import Never

import pytest

from pipecompile.distributed.failures import board_watch


class Waiting:
    def __init__(self) -> None:
        self.is_checked = Event()

    def check_wait(self) -> None:
        self.is_checked.set()


def test_objects_are_checked_while_they_are_referenced(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Waiting(), Waiting()
    for waiting in (first, second):
        board_watch.watch(waiting)
    assert first.is_checked.wait(10)
    assert second.is_checked.wait(10)
    assert len(board_watch._THREADS) == 1
    assert board_watch._THREADS[0].daemon
    watched = len(board_watch._WATCHED)
    del second, waiting
    gc.collect()
    assert len(board_watch._WATCHED) <= watched - 1


def test_threads_that_begin_to_wait_at_once_start_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each made one, and one of them started the other's twice, before."""
    made: list[int] = []
    ended: list[bool] = []

    def interrupts() -> None:
        made.append(1)
        sleep(0.1)

    def watch() -> None:
        board_watch.watch(waiting)
        ended.append(True)

    changed = {"_THREADS": [], "_INTERRUPTS": [], "Interrupts": interrupts, "_check_all": lambda _: None}
    for name, value in changed.items():
        monkeypatch.setattr(board_watch, name, value)
    waiting, threads = Waiting(), [Thread(target=watch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]
    assert len(ended) == 4


def test_a_report_is_awaited_for_some_time() -> None:
    calls: list[float] = []
    start = monotonic()
    board_watch.await_report(lambda: calls.append(monotonic()), 0.1, 0.01)
    assert monotonic() - start >= 0.1
    assert len(calls) > 1

    def check() -> Never:
        raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        board_watch.await_report(check, 5.0)


def test_the_end_of_the_main_thread_is_noted_once_while_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[list[str]] = []
    is_over = Event()
    thread = Thread(target=is_over.wait, name="wandb-sync")
    monkeypatch.setattr(board_watch, "_AT_MAIN_END", [])
    board_watch.at_main_end(lambda names: noted.append([name for name in names if name == "wandb-sync"]))
    thread.start()
    board_watch._note_main_end()
    board_watch._note_main_end()
    is_over.set()
    thread.join()
    assert noted == [["wandb-sync"]]
