"""A GPT-2 and a T5 of transformers, as their authors wrote them, train in four stages with the loss curve of eager.

They run with all stages in one memory, or with one each, so that the tied weights are mirrored. Sums of gradients have
another order than in eager, so the models are in float64, where 50 steps keep the curves together to 1e-9; GPT-2's own loss
is in float32 whatever its weights are, and the curves differ in its last digit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.driver.backend import Backend

transformers = pytest.importorskip("transformers")

STEPS = 30
VOCABULARY = 40


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def tied_names(model: nn.Module) -> dict[int, list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {key: known for key, known in names.items() if len(known) > 1}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("make", "apart", "tolerance"), [(gpt2, False, 1e-6), (t5, True, 1e-9), (gpt2, True, 1e-6)])
def test_many_steps(
    make: Callable[[], nn.Module], apart: bool, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if apart:
        monkeypatch.setattr(Backend, "memories", lambda _, devices, placement: range(len(devices)))
    torch.manual_seed(0)
    model = make().double()
    eager, tied = copy.deepcopy(model), tied_names(model)
    assert tied
    pipe = pc.compile(model, 4, n_microbatches=2, devices=["cpu"] * 4, cost="analytic")
    mine, theirs = torch.optim.AdamW(pipe.parameters(), 1e-2), torch.optim.AdamW(eager.parameters(), 1e-2)
    curve, wanted = [], []
    for _ in range(STEPS):
        tokens = (torch.randint(VOCABULARY, (4, 1)) + torch.arange(8)) % VOCABULARY
        mine.zero_grad()
        theirs.zero_grad()
        curve.append(pipe.step(input_ids=tokens, labels=tokens))
        loss = eager(input_ids=tokens, labels=tokens).loss
        loss.backward()
        wanted.append(loss.detach())
        mine.step()
        theirs.step()
    torch.testing.assert_close(torch.stack(curve), torch.stack(wanted), rtol=tolerance, atol=0)
    assert curve[-1] < 0.7 * curve[0]
    assert tied_names(model) == tied
    assert bool(pipe._cache.latest.mirrors.mirrors) == apart
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(pipe.state_dict()[name], value, rtol=1e-6, atol=tolerance)
