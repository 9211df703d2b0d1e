"""A memo entry of any number takes no memory, and a class may refuse names."""

from __future__ import annotations

import io
import pickle
import tracemalloc
from typing import Any

import pytest

from pipecompile.parameters.pure_unpickler import PureUnpickler


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
