"""Reads of metadata, and writes that versions do not show."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pipecompile.tracing.emit.effects import is_metadata_query, undeclared_writes

X, MEAN, VAR = torch.randn(3, 4), torch.zeros(4), torch.ones(4)


def test_metadata_is_read_without_a_node() -> None:
    assert is_metadata_query(torch.Tensor.size)
    assert is_metadata_query(torch.Tensor.shape.__get__)
    assert not is_metadata_query(torch.Tensor.sum)
    assert not is_metadata_query(torch.Tensor.data.__get__)


def test_batch_norm_writes_its_statistics_only_while_training() -> None:
    assert list(map(id, undeclared_writes(F.batch_norm, (X, MEAN, VAR, None, None, True), {}))) == [id(MEAN), id(VAR)]
    assert undeclared_writes(F.batch_norm, (X, MEAN, VAR), {}) == []
    named = {"running_mean": MEAN, "running_var": VAR, "training": True}
    assert list(map(id, undeclared_writes(F.batch_norm, (X,), named))) == [id(MEAN), id(VAR)]


def test_instance_norm_uses_its_input_by_default() -> None:
    assert list(map(id, undeclared_writes(F.instance_norm, (X, MEAN, VAR), {}))) == [id(MEAN), id(VAR)]
    assert undeclared_writes(F.instance_norm, (X, None, None), {}) == []


def test_a_hook_changes_the_tensor_that_it_is_on() -> None:
    assert undeclared_writes(torch.Tensor.register_hook, (X, print), {})[0] is X
    assert undeclared_writes(torch.Tensor.requires_grad.__set__, (X, True), {})[0] is X
    assert undeclared_writes(torch.add, (X, X), {}) == []
