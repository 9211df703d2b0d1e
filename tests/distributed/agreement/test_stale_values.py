"""Which tensors of another rank may be read here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipecompile.distributed.agreement.stale_values import StaleValues
from pipecompile.errors import InputError


def tensors() -> dict[str, torch.Tensor]:
    return {
        "trained": nn.Parameter(torch.ones(2)),
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "buffer": torch.ones(2),
    }


def readable(old: StaleValues) -> dict[str, bool | str]:
    found: dict[str, bool | str] = {}
    named = old.elsewhere()
    with old.hidden(named):
        for tensor, name in named.items():
            try:
                found[name] = bool(tensor.sum() == 2)
            except InputError as error:
                found[name] = error.what
    assert all(type(tensor) in (torch.Tensor, nn.Parameter) for tensor in named)
    return found


def test_trained_weights_are_old_and_others_are_not():
    old = StaleValues(tensors().copy)
    assert readable(old) == {
        "trained": "the values of trained are read on a rank that does not train it",
        "frozen": True,
        "buffer": True,
    }


def test_a_buffer_that_another_rank_writes_is_old():
    named = tensors()
    old = StaleValues(lambda: named)
    old.note_written([named["buffer"]])
    assert readable(old)["buffer"] == "the values of buffer are read on a rank that does not update it"
    assert readable(old)["frozen"] is True


def test_what_a_state_left_out_is_old_until_a_whole_one_is_loaded():
    named = tensors()
    old = StaleValues(lambda: named)
    old.note_loaded({"trained", "buffer"}, named.keys())
    assert readable(old)["frozen"] == "the values of frozen are read, which lives on another rank"
    assert readable(old)["buffer"] is True
    old.note_loaded(named.keys(), named.keys())
    assert readable(old)["frozen"] is True


def test_what_no_state_has_is_not_left_out():
    named = tensors()
    old = StaleValues(lambda: named)
    old.note_loaded({"trained", "frozen"}, {"trained", "frozen"})
    assert readable(old)["buffer"] is True


def test_tensors_of_own_stages_are_not_elsewhere():
    named = tensors()
    with pytest.raises(KeyError):
        StaleValues(lambda: named).elsewhere({id(named["frozen"])})[named["frozen"]]


@pytest.mark.parametrize("name", ["frozen", "buffer"])
def test_a_write_to_a_tensor_of_another_rank_is_refused(name: str):
    old = StaleValues(tensors().copy)
    named = old.elsewhere()
    tensor = next(tensor for tensor, label in named.items() if label == name)
    with pytest.raises(InputError, match=f"{name}, which lives on another rank, is written on this one"), old.hidden(named):  # fmt: skip
        tensor.add_(1)
    with pytest.raises(InputError, match="is written on this one"), old.hidden(named):
        tensor.data = tensor + 1  # its version stays
    with old.hidden(named):
        tensor.sum()
