"""Decoders of transformers return their caches, and take them: the pipeline does what the model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import pipecompile as pc
from pipecompile.batching.containers import with_shells


def words(size: int, length: int) -> torch.Tensor:
    return torch.randint(1, 50, (size, length), generator=torch.Generator().manual_seed(size))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                                        intermediate_size=16, max_position_embeddings=32))  # fmt: skip


def t5() -> nn.Module:
    return T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))


def past(size: int) -> DynamicCache:
    cache = DynamicCache()
    for layer in range(2):
        cache.update(torch.full((size, 1, 4, 8), 0.5), torch.full((size, 1, 4, 8), 0.25), layer)
    return cache


CASES: dict[str, Any] = {
    "the cache comes out": (llama, lambda size: {"input_ids": words(size, 6)}),
    "the cache goes in": (llama, lambda size: {"input_ids": words(size, 1), "past_key_values": past(size)}),
    "of encoder and decoder": (t5, lambda size: {"input_ids": words(size, 6), "decoder_input_ids": words(size, 3)}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_outputs_are_those_of_the_model_cache_and_all(case):
    make, inputs = CASES[case]
    model = make().eval()
    with torch.no_grad():
        expected = model(**inputs(3))
    pipe = pc.compile(model, 2, example_kwargs=inputs(4), n_microbatches=1, cost="analytic", partitioner="dp")
    with torch.no_grad():
        made = pipe(**inputs(3))
    assert type(made) is type(expected)
    assert type(made.past_key_values) is type(expected.past_key_values)
    assert made.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length() > 0
    mine, theirs = (pytree.tree_leaves(with_shells(value)) for value in (made, expected))
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else type(one) is type(other)
