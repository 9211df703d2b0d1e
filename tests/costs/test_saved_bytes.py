from __future__ import annotations

import torch

from pipecompile.costs.saved_bytes import SavedLedger


def test_a_storage_is_counted_once_and_a_view_counts_all_of_it() -> None:
    ledger = SavedLedger(())
    x = torch.randn(10, 10, requires_grad=True)
    with ledger.recording():
        x[:5].exp().sin()
        x.cos()
    assert ledger.take() == 200 + 400  # exp saves its result, and sin the same storage again; cos saves x
    assert ledger.take() == 0


def test_free_tensors_count_nothing_whatever_view_is_saved() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    ledger = SavedLedger([weight])
    with ledger.recording():
        torch.randn(2, 4, requires_grad=True) @ weight.t()
    assert ledger.take() == 2 * 4 * 4


def test_a_new_storage_at_the_address_of_a_freed_one_is_counted() -> None:
    ledger = SavedLedger(())
    for _ in range(50):
        with ledger.recording():
            torch.randn(4, requires_grad=True).cos()
    assert ledger.take() == 50 * 16


def test_recording_leaves_the_gradient_right() -> None:
    x = torch.randn(3, requires_grad=True)
    with SavedLedger(()).recording():
        y = x.exp()
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, x.detach().exp())
