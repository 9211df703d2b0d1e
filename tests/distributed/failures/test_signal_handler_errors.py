"""Exceptions of signal handlers are told from those of the call that waited."""

from __future__ import annotations

import pytest

from pipecompile.distributed.failures.signal_handler_errors import is_from_handler


def _caught(call: object) -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        call()  # type: ignore[operator]
    error = caught.value
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
    return error


def _raise() -> None:
    raise RuntimeError("of a handler")


def _wait() -> None:
    exec(compile("def wait(): raise RuntimeError('connection reset')", "c10d", "exec"), space := {"__name__": "torch.distributed.c"})  # fmt: skip
    space["wait"]()


def _loader() -> None:
    exec(compile("def handler(): raise RuntimeError('killed')", "loader", "exec"), space := {"__name__": "torch.utils.data.s"})  # fmt: skip
    space["handler"]()


@pytest.mark.parametrize(("call", "expected"), [(_raise, True), (_loader, True), (_wait, False)])
def test_the_innermost_python_code_decides(call: object, expected: bool) -> None:
    assert is_from_handler(_caught(call)) == expected


def test_an_exception_without_a_traceback_is_of_the_call() -> None:
    assert not is_from_handler(RuntimeError())
