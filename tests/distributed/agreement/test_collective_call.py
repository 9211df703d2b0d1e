from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipecompile.distributed.agreement.call_batch import CallBatch
from pipecompile.distributed.agreement.collective_call import COMPARED_PLACES, CollectiveCall

MODEL = nn.Linear(4, 4)
X, Y = torch.arange(32.0).view(8, 4), torch.arange(8)


def test_the_text_has_the_function_the_modes_and_the_layouts() -> None:
    call = step((X,), Y, scale=2)
    assert str(call) == "pipe.step(input 0 (8, 4) float32, input 1 2, target (8,) int64), training"
    assert call.samples() == "input 0 begins 0, 1, 2, 3, target begins 0, 1, 2, 3"
    assert str(CollectiveCall("pipe.gathered")) == "pipe.gathered()"


def test_the_modes_are_those_of_the_model_and_of_the_thread() -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        text = str(CollectiveCall.of("pipe", nn.Linear(1, 1).eval(), CallBatch.of((X,), {})))
    assert text.endswith(", in eval mode, without gradients, autocast bfloat16 on cpu")


@pytest.mark.parametrize("other", [(X[:4], Y[:4]), (X.double(), Y), (X, None), (X, Y.int())])
def test_calls_of_other_layouts_have_other_keys(other: tuple[Any, Any]) -> None:
    key = step((X,), Y).key
    assert key == step((X + 1,), Y + 1).key
    assert key != step((other[0],), other[1]).key


def test_lists_of_other_lengths_have_other_keys() -> None:
    one, two = (CollectiveCall("pipe.step", "", CallBatch.of_list([(X, Y)] * n, with_target=True)) for n in (1, 2))
    assert one.key != two.key


def step(args: tuple[Any, ...], target: Any = None, scaler: Any = None, **kwargs: Any) -> CollectiveCall:
    return CollectiveCall.of("pipe.step", MODEL, CallBatch.of(args, kwargs, target), scaler)


def contents(*leaves: Any, is_due: bool = True) -> list[int]:
    digest, *numbers = step(leaves).contents(is_due=is_due)
    assert len(numbers) == COMPARED_PLACES
    assert digest == digest_of(*leaves, is_due=is_due)
    return numbers


def digest_of(*leaves: Any, is_due: bool = True) -> int:
    return step(leaves).contents(is_due=is_due)[0]


def test_a_batch_without_placeholders_has_a_digest() -> None:
    assert digest_of(X, Y, 3, None, "text") == digest_of(X.clone(), Y.clone(), 4, None, "other") != 0
    assert digest_of(X, Y) != digest_of(X, Y + 1)
    for placeholder in (torch.zeros(8), torch.ones(1), torch.empty(8, device="meta"), object()):
        assert digest_of(X, placeholder) == 0
    assert digest_of(X, torch.zeros(0)) != 0
    assert digest_of(*[X] * 64) != 0 == digest_of(*[X] * 65)


def test_contents_tell_batches_apart() -> None:
    first, second, *rest = contents(X, Y)
    assert not any(rest)
    assert [first, second] == contents(X.clone(), Y.clone())[:2]
    assert first != contents(X + 1)[0] != 0
    assert first == contents(X.T.contiguous().T)[0]
    assert not any(contents(torch.empty(8, 4, device="meta"), "text", None, torch.zeros(0)))


def test_numbers_of_what_may_be_a_placeholder_are_even() -> None:
    numbers = contents(X, torch.zeros(8, 4), torch.ones(8), torch.tensor(3.0), torch.tensor(4.0))[:5]
    assert [number & 1 for number in numbers] == [1, 0, 0, 0, 0]
    assert len({*numbers, 0}) == 6


def test_further_inputs_share_the_last_place() -> None:
    numbers = contents(*[X] * 20)
    assert numbers[0] == numbers[-2] != numbers[-1]
    assert numbers[-1] not in (contents(*[X] * 19, X + 1)[-1], 0)
    assert contents(*[X] * 19, torch.zeros(8))[-1] & 1 == 0
    call = step((*[X] * 20,))
    assert call.read_bits(None) is None
    assert call.read_bits((1 << 20) - 1) == (1 << COMPARED_PLACES) - 1
    assert call.read_bits((1 << 19) - 1) == (1 << COMPARED_PLACES - 1) - 1, "the last place is read if all in it are"


def test_an_example_has_no_samples() -> None:
    batch = CallBatch.of((X,), {})
    assert [CollectiveCall(name, "", batch).has_samples for name in ("pipe.step", "pipe.prepare")] == [True, False]
    assert not CollectiveCall("pipe.gathered").has_samples


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float16, torch.complex64, torch.int8, torch.float8_e4m3fn]
)
def test_contents_of_any_dtype_are_read_or_left_out(dtype: torch.dtype) -> None:
    number = contents(Y.remainder(2).to(dtype))[0]
    assert number == contents(Y.remainder(2).to(dtype))[0]
    assert number or dtype is torch.float8_e4m3fn


def test_tensors_that_cannot_be_read_say_nothing() -> None:
    assert not any(contents(X.to_sparse(), object()))


def test_a_scaler_is_part_of_the_call() -> None:
    scaled, other, off = (
        torch.amp.GradScaler("cpu", init_scale=scale, enabled=enabled)
        for scale, enabled in ((8.0, True), (16.0, True), (8.0, False))
    )
    calls = [step((X,), Y, scaler) for scaler in (scaled, other, off, None)]
    assert str(calls[0]).endswith(", training, with a GradScaler of scale 8")
    assert len({call.key for call in calls}) == 3
    assert calls[2].key == calls[3].key, "one that is off does nothing"
