"""The rows of a container: all items, or all but those that are read at every run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend

from pipecompile.tracing.guards.attribute_reads import AttributeReads
from pipecompile.tracing.guards.container_state import add_container, is_atom
from pipecompile.tracing.guards.state_fetch import StateFetch
from pipecompile.tracing.guards.state_reader import StateReader


@pytest.mark.parametrize("container", [{"a": 1.0, "b": 2.0}, [1.0, 2.0]])
def test_an_item_that_is_read_at_every_run_may_change_and_others_not(container: Any) -> None:
    first, second = (list(container) if isinstance(container, dict) else range(2))[:2]
    reader = StateReader(nn.Identity(), AttributeReads(), frozenset(), {f"c[{first!r}]"})
    add_container(reader, container, "c", "")
    fetch = StateFetch(reader.state)
    container[first] = 7.0
    assert fetch.is_unchanged()
    container[second] = 7.0
    assert not fetch.is_unchanged()


def test_members_of_enums_of_c_plus_plus_have_no_parts() -> None:
    assert is_atom(SDPBackend.MATH)
    assert not is_atom([SDPBackend.MATH])
    assert not is_atom(torch.Generator())
