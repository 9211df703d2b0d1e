from __future__ import annotations

import gc

import pytest

from pipecompile.ir.gc_pause import without_collection


@without_collection
def collects(*, fail: bool = False) -> bool:
    if fail:
        raise ValueError
    return gc.isenabled()


def test_no_garbage_is_collected_meanwhile_and_all_is_as_it_was_after() -> None:
    assert gc.isenabled()
    assert not collects()
    assert gc.isenabled()
    with pytest.raises(ValueError):
        collects(fail=True)
    assert gc.isenabled()


def test_who_has_turned_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        collects()
        assert not gc.isenabled()
    finally:
        gc.enable()
