from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from pipecompile.distributed.failures.interrupts import Interrupts


@pytest.fixture
def no_descriptor() -> Iterator[None]:
    """The wakeup descriptor is free, and is again what it was afterwards."""
    before = signal.set_wakeup_fd(-1)
    yield
    signal.set_wakeup_fd(before)


@pytest.mark.usefixtures("no_descriptor")
def test_ctrl_c_is_noticed_if_python_raises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts = Interrupts()
    assert not interrupts.wait(0.0)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert interrupts.wait(5.0)
    assert not interrupts.wait(0.0)
    monkeypatch.setattr(signal, "getsignal", lambda _: print)  # a handler of the user's own
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert not interrupts.wait(5.0)
    interrupts.leave()


@pytest.mark.usefixtures("no_descriptor")
def test_a_descriptor_of_other_code_is_left_alone() -> None:
    first = Interrupts()
    second = Interrupts()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert not second.wait(0.0)
    assert first.wait(0.0)
    second.leave()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert first.wait(0.0)
    first.wake()
    assert not first.wait(5.0)
    first.leave()
