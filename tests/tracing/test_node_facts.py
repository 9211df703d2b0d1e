"""Facts on nodes."""

from __future__ import annotations

import pytest
from torch import fx

from pipecompile.tracing.node_facts import NodeFacts, Role, facts, has_facts, note, set_facts, value_of


@pytest.fixture
def node() -> fx.Node:
    return fx.Graph().placeholder("x")


def test_a_node_without_facts_has_the_defaults(node: fx.Node) -> None:
    assert facts(node) == NodeFacts()
    assert value_of(node) is None
    assert not has_facts(node)


def test_facts_and_value_are_noted(node: fx.Node) -> None:
    set_facts(node, NodeFacts(module="head"), 3)
    assert (facts(node).module, value_of(node), has_facts(node)) == ("head", 3, True)


def test_a_note_changes_no_copy_of_the_node(node: fx.Node) -> None:
    set_facts(node, NodeFacts(module="head"), None)
    copy = node.graph.node_copy(node)
    note(node, module="tail", draws=True)
    assert (facts(copy).module, facts(copy).draws) == ("head", False)
    assert (facts(node).module, facts(node).draws) == ("tail", True)


@pytest.mark.parametrize(
    ("role", "is_size"), [(Role.VALUE, False), (Role.SIZE, True), (Role.BATCH_SIZE, True), (Role.SWITCH, False)]
)
def test_sizes_are_two_of_the_roles(role: Role, is_size: bool) -> None:
    assert NodeFacts(role=role).is_size is is_size
