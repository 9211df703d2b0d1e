"""Places are of the user's code: frames of torch, of Python's library and of the package are skipped."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from pipecompile.tracing.user_source import (
    called_by_user,
    caller,
    folder_prefixes,
    frames,
    is_foreign,
    line_of,
    muted,
    raiser,
    warn,
)


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(3)


def test_the_caller_is_the_innermost_frame_of_the_user() -> None:
    line = sys._getframe().f_lineno + 1
    assert caller() == f"{__file__}:{line} in test_the_caller_is_the_innermost_frame_of_the_user"


def test_the_raiser_is_the_innermost_line_of_the_user() -> None:
    with pytest.raises(RuntimeError) as caught:
        nn.Sequential(Fails())(torch.ones(2, 2))
    line = Fails.forward.__code__.co_firstlineno + 1
    assert raiser(caught.value) == f"{__file__}:{line} in Fails.forward:  return x @ torch.ones(3)"
    passed = [frame for frame, _ in frames(caught.value)]
    assert passed[-1].f_code is Fails.forward.__code__
    assert any(is_foreign(frame) for frame in passed)
    assert not is_foreign(passed[-1])


def test_libraries_are_not_the_user() -> None:
    answers: list[bool] = []

    def patched(*_: object) -> None:
        answers.append(called_by_user())

    class Copied:
        __copy__ = patched

    patched()
    copy.copy(Copied())  # called by the standard library
    model = nn.Linear(1, 1)
    model.register_forward_pre_hook(patched)  # called by torch
    model(torch.ones(1, 1))
    assert answers == [True, False, False]


def test_a_place_is_shown_without_directories() -> None:
    assert line_of("/home/me/model.py:3 in Net.forward") == "model.py:3 in Net.forward"
    assert line_of("model.py:3 in forward") == "model.py:3 in forward"


def test_files_behind_a_symbolic_link_are_foreign_too(tmp_path: Path) -> None:
    """An environment may be a link: frames then have the path of the link, which torch's resolved path does not begin."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    prefixes = folder_prefixes(tmp_path / "link")
    assert f"{tmp_path}/link/a.py".startswith(prefixes)
    assert f"{tmp_path}/real/a.py".startswith(prefixes)
    assert not f"{tmp_path}/linked/a.py".startswith(prefixes)


def test_no_warning_is_given_while_they_are_muted(recwarn) -> None:
    with muted():
        warn("nothing", UserWarning)
    assert not recwarn
    warn("something", UserWarning)
    assert [str(one.message) for one in recwarn] == ["something"]
