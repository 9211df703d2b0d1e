"""Rules of communicators have names."""

from __future__ import annotations

import pytest

from pipecompile.errors import InputError
from pipecompile.interchange.communicator_rules import CommunicatorRule, rules_named


def test_rules_are_named_in_a_text_or_a_sequence() -> None:
    assert rules_named("rank, pair,rank") == (CommunicatorRule.RANK, CommunicatorRule.PAIR)
    assert rules_named(["lazy"]) == (CommunicatorRule.LAZY,)


@pytest.mark.parametrize("names", ["", "fifo", [], None, 3, ["rank", 3]])
def test_other_names_are_refused(names: object) -> None:
    with pytest.raises(InputError):
        rules_named(names)


def test_a_queue_makes_a_message_wait_for_the_one_before() -> None:
    assert [rule.value for rule in CommunicatorRule if rule.is_queued] == ["pair", "rank", "lazy"]
