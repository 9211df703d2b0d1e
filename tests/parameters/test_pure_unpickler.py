"""A memo entry of any number takes no memory, a class may refuse names, and plain data come back."""

from __future__ import annotations

import io
import pickle
import time
import tracemalloc
from contextlib import suppress
from resource import RUSAGE_SELF, getrusage
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.parameters.pure_unpickler import PureUnpickler, plain_value


def test_a_memo_entry_of_a_large_number_takes_no_memory() -> None:
    tracemalloc.start()
    assert PureUnpickler(io.BytesIO(b"\x80\x02]r\xff\xff\xff\x07.")).load() == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000  # a gigabyte with the unpickler of C


def test_a_subclass_finds_classes_itself() -> None:
    class Refusing(PureUnpickler):
        def find_class(self, module: str, name: str) -> Any:
            raise pickle.UnpicklingError(name)

    with pytest.raises(pickle.UnpicklingError, match="PurePosixPath"):
        Refusing(io.BytesIO(b"cpathlib\nPurePosixPath\n.")).load()


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(value=plain, protocol=st.integers(1, 5))
def test_plain_data_come_back(value, protocol):
    assert plain_value(pickle.dumps(value, protocol)) == value


class Evil:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize(
    "value",
    [Evil(), {1, 2}, print, Evil, {(1, 2): 3}, {None: 1}, complex(1, 2), bytearray(b"x")],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_other_values_are_refused(value, protocol, capsys):
    with pytest.raises(pickle.UnpicklingError):
        plain_value(pickle.dumps(value, protocol))
    assert not capsys.readouterr().out


def laughing_key() -> bytes:
    """Return a pickle of a dict, the key of which is a tuple of one tuple twice, 60 levels deep: its hash takes 2**60 steps."""
    levels = b"".join(b"q%ch%c\x86" % (level, level) for level in range(60))
    return b"\x80\x02})" + levels + b"K\x01s."


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b".",
        b"\x80\x02}q\x00",
        b"\x80\x02]r\xff\xff\xff\x7f.",  # a memo entry of a number beyond all memory
        b"]" * 50_000,
        b"]" + b"]" * 100_000 + b"a" * 100_000 + b"u.",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",
        b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.",
        laughing_key(),
    ],
)
def test_hostile_files_end_soon(content):
    begin, memory = time.thread_time(), getrusage(RUSAGE_SELF).ru_maxrss
    with suppress(Exception):  # a damaged pickle raises anything
        plain_value(content)
    assert time.thread_time() - begin < 20  # 0.1 s, and a second where the collector goes through a large heap
    assert getrusage(RUSAGE_SELF).ru_maxrss - memory < 1 << 20  # KiB
