"""A mini-batch of packed sequences as micro-batches of whole sequences, and arguments that functions split."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipecompile.batching.microbatch_list import MicrobatchList
from pipecompile.batching.packed_split import Splits, split_call
from pipecompile.errors import InputError

CU, TOKENS = torch.tensor([0, 4, 6, 9]), torch.arange(18.0).view(9, 2)


def forward(tokens: torch.Tensor, cu: Any, other: Any = None, *, limit: int = 0) -> None:
    raise AssertionError("nothing of the model runs")


def split(*args: Any, splits: Splits | None = None, dims: Any = None, target: Any = None, **kwargs: Any) -> MicrobatchList:  # fmt: skip
    listed = split_call(forward, args, kwargs, target, splits or {"cu": "offsets"}, dims or {}, 2)
    assert listed is not None
    return listed


def test_tokens_and_offsets_go_by_sequences() -> None:
    labels = torch.arange(9)
    listed = split(TOKENS, CU, torch.tensor([7, 8, 9]), limit=4, target={"labels": labels})
    assert (listed.sizes, listed.is_split) == ((4, 5), True)
    first, second = listed.calls
    assert first.dims == second.dims == (0, None, None, None)
    assert [one.tolist() for one in first.tensors] == [TOKENS[:4].tolist(), [0, 4], [7]]
    assert [one.tolist() for one in second.tensors] == [TOKENS[4:].tolist(), [0, 2, 5], [8, 9]]
    assert second.kwargs == {"limit": 4}
    assert [target["labels"].tolist() for target in listed.targets] == [[0, 1, 2, 3], [4, 5, 6, 7, 8]]


def test_lengths_and_tokens_in_another_dimension() -> None:
    listed = split(TOKENS.T[None], torch.tensor([4, 2, 3]), splits={"cu": "lengths"})
    assert [one.dims for one in listed.calls] == [(2, None)] * 2
    assert [tuple(leaf.shape) for leaf in listed.calls[1].tensors] == [(1, 2, 5), (2,)]
    assert listed.calls[1].leaves[1].tolist() == [2, 3]


def test_two_packings_of_the_same_sequences() -> None:
    listed = split(TOKENS, CU, {"cu": torch.tensor([0, 1, 2, 5]), "x": torch.arange(5)}, splits={"cu": "offsets"}, dims={"other_cu": None, "other_x": None})  # fmt: skip
    assert listed.calls[0].leaves[2].tolist() == [0, 1, 2, 5]  # shared, as said

    def crossed(q: torch.Tensor, k: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor) -> None: ...

    own = split_call(crossed, (TOKENS, torch.arange(5), CU, torch.tensor([0, 1, 2, 5])), {}, None,
                     {"cu_q": "offsets", "cu_k": "offsets"}, {}, 2)  # fmt: skip
    assert own is not None
    assert [leaf.tolist() for leaf in own.calls[1].tensors[1:]] == [[1, 2, 3, 4], [0, 2, 5], [0, 1, 4]]
    with pytest.raises(InputError, match="pack equally many tokens in different ways"):
        split_call(crossed, (TOKENS, TOKENS, CU, torch.tensor([0, 1, 2, 9])), {}, None, {"cu_q": "offsets", "cu_k": "offsets"}, {}, 2)  # fmt: skip
    with pytest.raises(InputError, match="cu_q: 3, cu_k: 1"):
        split_call(crossed, (TOKENS, TOKENS, CU, torch.tensor([0, 9])), {}, None, {"cu_q": "offsets", "cu_k": "offsets"}, {}, 2)  # fmt: skip


def test_a_function_gives_each_micro_batch_its_own() -> None:
    seen: list[Any] = []

    def own(value: Any, sizes: tuple[int, ...]) -> list[Any]:
        seen.append((value, sizes))
        return [{"n": torch.tensor(float(size)), "m": size} for size in sizes]

    listed = split(TOKENS, "anything", splits={"cu": own}, target=torch.arange(9))
    assert seen == [("anything", (5, 4))]
    assert [one.args[1]["m"] for one in listed.calls] == [5, 4]
    assert listed.calls[0].dims == (0, None, None)
    assert [target.tolist() for target in listed.targets] == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
    both = split(TOKENS, CU, 3, splits={"cu": "offsets", "other": lambda _, sizes: [*sizes]})
    assert [one.args[2] for one in both.calls] == [4, 5]
    with pytest.raises(InputError, match="returned 1 entry for 2 micro-batches"):
        split(TOKENS, CU, splits={"cu": lambda *_: [1]})


def test_what_is_neither_of_tokens_nor_of_sequences() -> None:
    with pytest.raises(InputError, match="other has neither an entry per token nor one per sequence"):
        split(TOKENS, CU, torch.zeros(5))
    shared = split(TOKENS, CU, torch.zeros(5), dims={"other": None})
    assert shared.calls[1].leaves[2].shape == (5,)


def test_a_call_without_the_argument_is_cut_as_ever() -> None:
    assert split_call(forward, (TOKENS, None), {}, None, {"cu": "offsets"}, {}, 2) is None
