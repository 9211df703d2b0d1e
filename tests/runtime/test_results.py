"""Outputs put together by structure and merge rule, and gradients of inputs by sample and stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.batching.call_inputs import flatten
from pipecompile.batching.merging import MergeKind, MergeRule
from pipecompile.batching.microbatches import MiniBatch
from pipecompile.runtime.registers import Frame
from pipecompile.runtime.results import Outputs, input_gradients, own_loss, return_input_gradients


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"y": x * 2, "constant": "text", "rows": x.shape[0] * 3}


@pytest.fixture(scope="module")
def outputs() -> Outputs:
    return Outputs(pc.trace(Model(), torch.ones(2, 3)))


def test_an_output_is_assembled_from_values_constants_and_sizes(outputs: Outputs) -> None:
    (name,) = outputs.names
    assert outputs.assemble({name: 1}.__getitem__, 5) == {"y": 1, "constant": "text", "rows": 15}


def test_outputs_are_merged_by_their_rules(outputs: Outputs) -> None:
    (name,) = outputs.names
    rules = {
        "y": MergeRule(MergeKind.JOINED, 0),
        "constant": MergeRule(MergeKind.SAME),
        "rows": MergeRule(MergeKind.SAME),
    }
    outputs.join([rules[key] for key in outputs.example])
    gathered = outputs.gathered({name: [torch.ones(2, 3), torch.zeros(1, 3)]}, (2, 1))
    whole = outputs.whole(gathered, (2, 1), {})
    assert whole["y"].shape == (3, 3)
    assert whole["rows"] == 9


def test_an_output_without_a_rule_is_refused_with_its_reason(outputs: Outputs) -> None:
    with pytest.raises(pc.InputError, match="rows differ"):
        outputs.join([MergeRule(MergeKind.REFUSED, reason="rows differ")] * 3)
    assert outputs.join_of(outputs.names[0]) == MergeRule(MergeKind.JOINED, 0)


def test_a_refused_leaf_has_its_path_and_the_line_that_computes_it(outputs: Outputs) -> None:
    refused, blamed = MergeRule(MergeKind.REFUSED), MergeRule(MergeKind.REFUSED, reason="rows differ")
    with pytest.raises(pc.InputError, match=r"output\['y'\]\n *where .*test_results.py:\d+ in Model.forward"):
        outputs.join([blamed, refused, refused])
    with pytest.raises(pc.InputError, match=r"output\['rows'\]\n"):
        outputs.join([refused, refused, blamed])
    outputs.join([MergeRule(MergeKind.JOINED, 0), *[MergeRule(MergeKind.SAME)] * 2])


def test_micro_batches_of_other_sizes_than_the_batch_are_refused_with_their_shapes(outputs: Outputs) -> None:
    (name,) = outputs.names
    outputs.join([MergeRule(MergeKind.JOINED, 0), *[MergeRule(MergeKind.SAME)] * 2])
    with pytest.raises(pc.InputError, match=r"mul.*\n.*micro-batches return \(2, 3\), \(1, 4\)"):
        outputs.gathered({name: [torch.ones(2, 3), torch.ones(1, 4)]}, (2, 1))


@pytest.mark.parametrize(
    ("output", "is_found"),
    [(torch.ones(()), True), (torch.ones(2), False), ({"loss": torch.ones(())}, True), ({"loss": 1.0}, False), (None, False)],
)  # fmt: skip
def test_the_loss_that_a_model_computes_itself(output: Any, is_found: bool) -> None:
    assert (own_loss(output) is not None) == is_found


def batch(x: torch.Tensor, sizes: tuple[int, ...] = (2, 1)) -> MiniBatch:
    return MiniBatch(flatten(Model().forward, (x,), {}), sizes)


def frame(*by_stage: dict[int, torch.Tensor | None]) -> Frame:
    return Frame([], [], departures={("x", True): list(by_stage)})


def test_gradients_of_stages_are_added_and_those_of_samples_joined() -> None:
    x = torch.ones(3, 1, requires_grad=True)
    ones, tens = torch.ones(2, 1), torch.full((2, 1), 10.0)
    (gradient,) = input_gradients(frame({0: ones, 2: tens}, {0: torch.ones(1, 1), 2: None}), ("x",), batch(x))
    assert gradient is not None
    assert gradient.tolist() == [[11], [11], [1]]


def test_a_micro_batch_without_gradient_gets_zeros_and_none_at_all_stays_none() -> None:
    x = torch.ones(3, 1, requires_grad=True)
    (gradient,) = input_gradients(frame({0: None}, {0: torch.ones(1, 1)}), ("x",), batch(x))
    assert gradient is not None
    assert gradient.tolist() == [[0], [0], [1]]
    assert input_gradients(frame({0: None}, {0: None}), ("x",), batch(x)) == [None]


def test_gradients_go_back_into_what_made_the_inputs() -> None:
    source = torch.ones(3, 1, requires_grad=True)
    return_input_gradients(("x",), batch(source * 5), frame({0: torch.ones(2, 1)}, {0: torch.ones(1, 1)}))
    assert source.grad is not None
    assert source.grad.tolist() == [[5], [5], [5]]
