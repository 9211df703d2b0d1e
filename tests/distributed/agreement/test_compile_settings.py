"""Options of `compile` as ranks compare them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import pipecompile as pc
from pipecompile.distributed.agreement.compile_settings import SETTINGS, check_settings, reschedule_text, settings_text
from pipecompile.distributed.failures.failure_report import Disagreement
from pipecompile.options import Options
from tests.support.compilations import layers, options_of

SCRIPTS = ["loss_reduction", "batch_norm", "check"]


def loss(output: Any, target: Any, weight: float = 1.0) -> Any:
    return weight * (output - target).square().mean()


def weighted(weight: float) -> Any:
    return lambda output, target: loss(output, target, weight)


def text(**options: Any) -> str:
    return settings_text(options_of(layers(4), **options))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss_reduction", "sum"),
        ("batch_norm", "deferred"),
        ("across_batch", "each"),
        ("checkpoint", "always"),
        ("n_microbatches", 3),
        ("schedule", "gpipe"),
        ("schedule", pc.build_schedule("gpipe", 2, 2)),
        ("gradient_sums", "device"),
        ("tied", "apart"),
        ("pin", {"0": 0}),
        ("split_before", ["1"]),
        ("loss_fn", partial(loss, weight=2.0)),
        ("loss_fn", weighted(2.0)),
        ("loss_fn", nn.CrossEntropyLoss(label_smoothing=0.1)),
        ("passes", [loss]),
    ],
)
def test_ranks_with_another_option_are_told_who_has_what(name: str, value: Any) -> None:
    first, second = text(), text(**{name: value})
    check_settings([first, first], (4, 5))
    with pytest.raises(Disagreement) as caught:
        check_settings([first, second, first], (4, 5, 7))
    assert str(caught.value).startswith(f"the ranks have other options of compile: {name}\n")
    assert f"ranks 4, 7: {name}=" in caught.value.where
    assert f"rank 5: {name}=" in caught.value.where


@pytest.mark.parametrize(("one", "other"), [
    (weighted(2.0), weighted(3.0)),
    (partial(loss, weight=2.0), partial(loss, weight=3.0)),
    (nn.HuberLoss(delta=1.0), nn.HuberLoss(delta=2.0)),
])  # fmt: skip
def test_functions_are_compared_with_what_they_close_over(one: Any, other: Any) -> None:
    assert text(loss_fn=one) == text(loss_fn=one)
    assert text(loss_fn=one) != text(loss_fn=other)


def numbered(rank: int) -> Any:
    is_first, place = rank == 0, f"cuda:{rank}"

    def loss_of_rank(output: Any, target: Any) -> Any:
        if is_first:
            print(rank, place)
        return loss(output, target)

    return loss_of_rank


def test_what_a_loss_knows_of_its_rank_may_differ() -> None:
    """A number, a flag or a device that a loss closes over, such as to log on one rank, is no other loss."""
    assert text(loss_fn=numbered(0)) == text(loss_fn=numbered(1))


@pytest.mark.parametrize("options", [{"check": False}, {"progress": True}, {"time_limit": 3}, {"memory_limit": 1e9}, {"cache_size": 2}], ids=str)  # fmt: skip
def test_what_changes_no_result_may_differ(options: dict[str, Any]) -> None:
    assert text() == text(**options)


def test_every_option_is_compared_or_left_out_on_purpose() -> None:
    """An option that is added is to be put in one of the two lists."""
    left_out = {
        "cost", "costs", "time_limit", "gap", "memory_limit", "speeds", "bandwidth", "optimizer_state", "devices", "partitions",
        "dispatch", "cuda_graphs", "check", "cache_size", "progress", "steering",
    }  # fmt: skip
    assert set(Options.__dataclass_fields__) == {*SETTINGS, *left_out}


def test_a_checkpoint_may_lie_elsewhere_on_another_host() -> None:
    from pipecompile.distributed.agreement.compile_settings import _text

    assert _text(Path("/a")) == _text(Path("/b"))


def test_a_call_of_reschedule_is_named_with_its_schedule() -> None:
    assert (
        reschedule_text(options_of(layers(4), schedule="gpipe", n_microbatches=3))
        == "reschedule('gpipe', n_microbatches=3)"
    )


@pytest.mark.timeout(700)
@pytest.mark.parametrize(("name", "values"), [("loss_reduction", ("mean", "sum")), ("batch_norm", ("each", "deferred"))])  # fmt: skip
def test_both_ranks_are_told_at_compile(said: dict[str, list[str]], name: str, values: tuple[str, str]) -> None:
    """Ranks waited for the timeout, or trained with what the owner of a layer had, before."""
    for text in said[name]:
        assert text.startswith(f"result: Disagreement: the ranks have other options of compile: {name}")
        assert f"rank 0: {name}='{values[0]}'; rank 1: {name}='{values[1]}'" in text
    assert all(text.startswith("result: 0.72827") for text in said["check"])
