"""Warnings of a pipeline: each comes once, with the line of the user where there is one."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import sympy
import torch

from pipecompile.driver.warnings_once import _REMEMBERED, WarningsOnce
from pipecompile.errors import RecordingWarning
from pipecompile.tracing.fakes.batch_symbol import Guard
from pipecompile.tracing.guards.state_guards import ReadChange
from tests.support.compilations import options_of

SIZE = sympy.Symbol("s", integer=True, positive=True)
GUARD = Guard(SIZE, SIZE > 2, "net.py:7 in forward")
ELSEWHERE = Guard(SIZE, SIZE > 2, "net.py:9 in forward")
NOWHERE = Guard(SIZE, SIZE > 2)


def given(*calls: Callable[[], object]) -> list[str]:
    """Return the messages of the warnings that these calls give."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in calls:
            call()
    assert all(warning.category is RecordingWarning for warning in caught)
    return [str(warning.message) for warning in caught]


def test_a_recording_made_again_is_one_warning_a_line() -> None:
    once = WarningsOnce()
    anew = [lambda guard=guard: once.anew((), guard, 2, 16) for guard in (GUARD, GUARD, ELSEWHERE, NOWHERE, NOWHERE)]
    first, second, third = given(*anew)
    assert first == (
        "the model branches on the batch size at net.py:7 in forward (batch_size > 2): recorded anew for micro-batches of"
        " 2 samples; this warning comes once"
    )
    assert "net.py:9" in second
    assert third.startswith("the model branches on the batch size (batch_size > 2):")
    assert given(lambda: WarningsOnce().anew((), GUARD, 2, 16))  # another pipeline warns by itself


def test_a_branch_warns_of_each_consequence() -> None:
    once = WarningsOnce()
    uneven = lambda: once.uneven(GUARD, (3, 3, 2), (8,))  # noqa: E731
    text, other = given(uneven, uneven, lambda: once.anew((), GUARD, 8, 16))
    assert "8 samples go into one micro-batch instead of 3 of 2 and 3 samples" in text
    assert "recorded anew" in other
    assert "go into 2 micro-batches instead of 3" in given(lambda: WarningsOnce().uneven(GUARD, (3, 3, 2), (4, 4)))[0]


def test_a_signature_that_was_dropped_comes_back_with_a_larger_cache_to_try() -> None:
    once = WarningsOnce()
    assert not given(lambda: once.anew(("a",), None, 2, 16))
    once.evicted(("a",))
    assert not given(lambda: once.anew(("b",), None, 2, 16))
    (text,) = given(lambda: once.anew(("a",), None, 2, 16), lambda: once.anew(("a",), None, 2, 16))
    assert "more kinds than the 16 recordings" in text
    assert "compile(..., cache_size=32)" in text


def test_only_so_many_dropped_signatures_are_remembered() -> None:
    once = WarningsOnce()
    for number in range(_REMEMBERED + 1):
        once.evicted((number,))
    assert not given(lambda: once.anew((0,), None, 2, 16))
    assert given(lambda: once.anew((1,), None, 2, 16))


def test_lists_warn_only_if_they_go_into_fewer_micro_batches() -> None:
    once = WarningsOnce()
    (text,) = given(lambda: once.unequal(8, 4, 4), lambda: once.unequal(7, 4, 1), lambda: once.unequal(9, 4, 3))
    assert text == "lists of 7 samples go into one micro-batch instead of 4, so that all have equally many"


def test_samples_that_meet_are_named_by_their_first_line() -> None:
    once = WarningsOnce()
    (text,) = given(
        lambda: once.mixed([]), lambda: once.mixed(["net.py:3", "net.py:4"]), lambda: once.mixed(["net.py:5"])
    )
    assert "meet at net.py:3:" in text
    assert 'batch_dims={"name": 1}' in text


@pytest.mark.parametrize(
    ("layers", "subject"), [(1, "a BatchNorm layer updates its"), (3, "3 BatchNorm layers update their")]
)
def test_batch_norms_are_counted(layers: int, subject: str) -> None:
    once = WarningsOnce()
    (text,) = given(lambda: once.normalised(0), lambda: once.normalised(layers), lambda: once.normalised(layers))
    assert text.startswith(f"{subject} running statistics once per micro-batch")
    assert "batch_norm='deferred'" in text


def test_compiled_stages_do_not_split_the_backward() -> None:
    options, once = options_of(schedule="zb-h1", compile_stages=True), WarningsOnce()
    (text,) = given(lambda: once.undivided(options), lambda: once.undivided(options))
    assert "a compiled stage computes all its gradients at once" in text
    assert text.endswith("compile_stages=False")
    assert not given(lambda: WarningsOnce().check_options(options_of(schedule="1f1b", compile_stages=True)))
    assert not given(lambda: WarningsOnce().check_options(options_of(schedule="zb-h1")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="stages on the CPU only")
def test_cuda_graphs_without_a_gpu_and_with_a_split_backward() -> None:
    split, none = given(lambda: WarningsOnce().check_options(options_of(schedule="zb-h1", cuda_graphs=True)))
    assert "a CUDA graph computes all its gradients at once" in split
    assert split.endswith("cuda_graphs=False")
    assert none == "cuda_graphs=True: there are no graphs on cpu, whose stages run as they are"
    (none,) = given(lambda: WarningsOnce().check_options(options_of(schedule="zb-h1", cuda_graphs="step")))
    assert none == "cuda_graphs='step': there are no graphs on cpu, whose stages run as they are"


def test_more_micro_batches_than_samples_is_a_warning_about_the_first_mini_batch() -> None:
    once = WarningsOnce()
    calls = [lambda wanted=wanted, samples=samples: once.fewer(samples, wanted) for wanted, samples in ((4, 4), (8, 3))]
    assert given(*calls) == [
        "n_microbatches=8, and the mini-batch has 3 samples: there will be 3, of one sample each."
        " Try n_microbatches=1, or a larger batch"
    ]
    assert once.counted == {4, 8}
    assert given(lambda: once.fewer(1, None), lambda: once.fewer(1, "auto"), lambda: once.fewer(None, 8)) == []


def test_draws_in_another_order_are_told_once() -> None:
    once = WarningsOnce()
    assert given(lambda: once.drawn("")) == []
    assert given(lambda: once.drawn("in stages 0, 2"), lambda: once.drawn("in stages 0, 2")) == ["in stages 0, 2"]


def test_a_value_that_a_step_changed_is_named_once_with_the_line_that_reads_it() -> None:
    once, change = WarningsOnce(), ReadChange("model.hits", 0, 2, "/a/net.py:7 in Net.forward")
    (text,) = given(lambda: once.outdated([change]), lambda: once.outdated([change]))
    assert text.startswith(
        "model.hits was changed in a step, by a piece of the model that is kept whole, and is read at net.py:7 in"
    )
