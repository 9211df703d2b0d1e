"""Changes of a model after it was compiled, as ranks compare them."""

from __future__ import annotations

from typing import Any

import pytest

from pipecompile.distributed.agreement.model_changes import agree_on_recording
from pipecompile.distributed.failures.failure_report import Disagreement
from pipecompile.tracing.guards.state_guards import ReadChange
from tests.distributed.rank_threads import ThreadCommunicator, run_communicators

SCRIPTS = ["attribute", "attribute of another rank", "layer", "hook", "frozen"]
FACTOR = ReadChange("model.factor", 1.0, 2.0, "model.py:7 in forward:  x * self.factor")
FROZEN = ReadChange("model.weight.requires_grad", True, False, "")


def errors_of(*rows: dict[str, Any]) -> list[str]:
    """Return the error of each rank, "" without one, for graphs and changes of each."""

    def run(communicator: ThreadCommunicator) -> str:
        given: dict[str, Any] = {"identity": "g", "structure": "s", "changes": (), "inputs": ["x", "y"]}
        given |= {"is_loaded": False, "in_copy": False}
        try:
            agree_on_recording(communicator, **given | rows[communicator.ranks.index])
        except Disagreement as error:
            return str(error)
        return ""

    return run_communicators(len(rows), run)


def test_ranks_that_change_the_same_go_on() -> None:
    assert errors_of({"changes": [FACTOR]}, {"changes": [FACTOR]}) == ["", ""]


def test_a_change_on_one_rank_is_named_with_the_rank_and_its_line() -> None:
    first, second = errors_of({}, {"changes": [FACTOR]})
    assert first == second
    assert "the model was changed on some ranks alone after it was compiled" in first
    assert "rank 10: no change; rank 11: model.factor: 1.0 -> 2.0, read at model.py:7" in first


def test_what_a_forward_has_left_on_one_rank_is_no_change_of_the_script() -> None:
    """The advice was to make the same change on every rank, for a table that grows with the longest batch."""
    table = ReadChange("model.layers.rotary.table", "a Tensor", "another", "")
    for text in errors_of({"written": ["table"]}, {"changes": [table]}):
        assert "a forward has left other values on the model than it had" in text
        assert "rank 10: no change; rank 11: model.layers.rotary.table" in text
    for row in ({"changes": [table, FACTOR]}, {"changes": [FACTOR]}):
        assert all("was changed on some ranks alone" in text for text in errors_of({"written": ["table"]}, row))


def test_a_rank_may_freeze_its_own_parameters() -> None:
    assert errors_of({}, {"changes": [FROZEN]}) == ["", ""]


def test_graphs_that_differ_without_a_change_are_told() -> None:
    assert all("the ranks disagree about the graph of the model" in text for text in errors_of({}, {"identity": "h"}))


def test_modules_that_do_something_else_are_named() -> None:
    """A fingerprint of the graph alone, before: a LoRA or a weight_norm of one rank had no name."""
    first = {"": "tanh", "2": "Linear(4, 4)", "3": "x" * 99}
    second = {"": "tanh", "2": "add", "2.A": "Linear(4, 2)", "2.B": "Linear(2, 4)", "3": "x" * 99}
    for text in errors_of({"parts": lambda: first}, {"identity": "h", "parts": lambda: second}):
        assert "where  rank 10: 2: Linear(4, 4); rank 11: 2: add; 2.A: Linear(4, 2) and 1 more\n" in text
    shorter, _ = errors_of({"parts": dict}, {"identity": "h", "parts": lambda: {"": "y" * 99}})
    assert f"rank 10: no calls; rank 11: the model: {'y' * 77}...\n" in shorter


def test_inputs_in_another_order_are_named() -> None:
    """A fingerprint of the graph alone, before."""
    first, second = errors_of({"identity": "g"}, {"identity": "h", "inputs": ["y", "x"]})
    assert first == second
    assert "the ranks give the model its inputs in different orders" in first
    assert "rank 10: x, y; rank 11: y, x" in first
    assert "the ranks give the model different inputs" in errors_of({}, {"identity": "h", "inputs": ["x"]})[0]


def test_extra_state_of_a_rank_may_change_constants_and_no_structure() -> None:
    loaded = {"identity": "h", "changes": [FACTOR], "is_loaded": True}
    assert errors_of({}, loaded) == ["", ""]
    assert all("disagree about the graph" in text for text in errors_of({}, loaded | {"structure": "t"}))


@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("attribute", "rank 0: no change; rank 1: model._modules['2'].factor: 1.0 -> 2.0, read at rank_scripts.py:"),
        ("attribute of another rank", "rank 0: no change; rank 1: model._modules['0'].factor: 1.0 -> 2.0, read at"),
        ("layer", "rank 0: model._modules['0'].linear: Linear(in_features=4, out_features=4, bias=True) -> Linear(in_"),
        ("hook", "rank 0: no change; rank 1: model._modules['2']._forward_hooks: "),
    ],
)
def test_a_step_after_a_change_on_one_rank_is_refused_until_all_have_it(
    said: dict[str, list[str]], name: str, change: str
) -> None:
    """Ranks trained a mixture, or went on with the model before the change, without a word."""
    for text in said[name]:
        first, alone, again, both = eval(text.splitlines()[0].removeprefix("result: "))
        assert first == 0.72827
        assert alone == again
        assert change in alone
        assert isinstance(both, float)
        assert both != first


@pytest.mark.timeout(700)
def test_a_parameter_that_one_rank_freezes_leaves_losses_as_they_are(said: dict[str, list[str]]) -> None:
    assert all(text.startswith("result: [0.72827, 0.72827, 0.72827, 0.72827]") for text in said["frozen"])
