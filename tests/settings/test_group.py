"""A group runs the check of every field, at construction and at a replacement."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import pytest

from pipecompile.errors import InputError
from pipecompile.settings.group import Group, checks_of
from pipecompile.settings.value_checks import choice, whole_number


@dataclass(frozen=True, kw_only=True)
class Counted(Group):
    count: Annotated[int, whole_number(4)]
    free: object = None


@dataclass(frozen=True, kw_only=True)
class Named(Group):
    name: Annotated[str, choice("a", "b")]


@dataclass(frozen=True, kw_only=True)
class Both(Counted, Named):
    pass


def test_a_field_is_made_canonical_and_a_field_without_a_check_stays() -> None:
    group = Both(count=np.int64(3), name="a", free=np.int64(3))  # type: ignore[arg-type]
    assert type(group.count) is int
    assert type(group.free) is np.int64


def test_all_bases_have_their_checks() -> None:
    assert set(checks_of(Both)) == {"count", "name"}
    for values in ({"count": 0, "name": "a"}, {"count": 1, "name": "c"}):
        with pytest.raises(InputError):
            Both(**values)  # type: ignore[arg-type]


def test_a_replacement_is_checked_too() -> None:
    with pytest.raises(InputError, match="count=0"):
        replace(Counted(count=1), count=0)


def test_a_group_can_be_sent() -> None:
    group = Both(count=2, name="b")
    assert pickle.loads(pickle.dumps(group)) == group
