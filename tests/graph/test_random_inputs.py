"""Random inputs are of many kinds, and include the special numbers."""

from __future__ import annotations

import math

import torch

from pipecompile.graph.random_inputs import has_special, random_values


def test_trials_differ_in_kind() -> None:
    torch.manual_seed(0)
    assert set(random_values([200], torch.int64, 0, [-7]).tolist()) == {0, 1, -7}
    assert set(random_values([200], torch.int64, 2, [-7]).tolist()) == {0, 1}
    assert set(random_values([200], torch.int64, 7, [-7]).tolist()) == {1, 2}
    fractions, sparse = (random_values([500], torch.float32, trial, []) for trial in (1, 3))
    assert fractions.min() > 0
    assert fractions.max() < 1
    assert (sparse == 0).float().mean() > 0.8
    shares = [random_values([500], torch.bool, trial, []).float().mean().item() for trial in range(3)]
    assert shares[1] < shares[0] < shares[2]


def test_nan_is_among_numbers_where_it_is_special_and_becomes_more_frequent() -> None:
    torch.manual_seed(0)
    for trial in range(4):
        is_nan = random_values([500], torch.float32, trial, [-7, math.nan]).isnan()
        assert bool(is_nan.any()) is has_special(trial)
        assert not has_special(trial) or is_nan[:100].sum() < is_nan[-100:].sum()
        assert -7 in random_values([500], torch.int64, 0, [-7, math.nan])
