"""Training under schedules of slices equals the loop over whole micro-batches, up to the order of sums."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from memory import peaks
from torch import nn

import pipecompile as pc
from tests.support.decoders import Decoder, difference, plain_step, token_loss, tokens_and_labels

CASES = [
    ("seq1f1b", 2, 4, "never", True, torch.float64),
    ("seq1f1b", 2, 2, "always", False, torch.float64),
    ("seq1f1b", 3, 4, "always", True, torch.float64),
    ("seq1f1b", 3, 2, "except_last", False, torch.float64),
    ("terapipe", 2, 4, "always", True, torch.float64),
    ("terapipe", 3, 2, "never", False, torch.float64),
    ("seq1f1b-interleaved", 4, 4, "never", True, torch.float64),
    ("seq1f1b", 3, 4, "never", True, torch.float32),
    ("terapipe", 2, 2, "always", False, torch.float32),
]


def sliced(model: nn.Module, n_stages: int, n_slices: int, name: str = "seq1f1b", **options: Any) -> pc.Pipeline:
    n_devices = 2 if name == "seq1f1b-interleaved" else n_stages
    schedule = pc.build_schedule(name, n_stages, 2, n_devices=n_devices, n_slices=n_slices)
    given = {"loss_fn": token_loss, "cost": "analytic", "dispatch": "inline", "devices": ["cpu"] * n_devices}
    return pc.compile(model, n_stages, schedule=schedule, **given | options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "n_stages", "n_slices", "checkpoint", "tied", "dtype"), CASES)
def test_steps_are_those_of_the_loop(
    name: str, n_stages: int, n_slices: int, checkpoint: str, tied: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = Decoder(tied=tied).to(dtype)
    other = copy.deepcopy(model)
    tolerance = 1e-10 if dtype is torch.float64 else 1e-5
    pipe = sliced(model, n_stages, n_slices, name, checkpoint=checkpoint)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (model, other)]
    for _ in range(3):
        tokens, labels = tokens_and_labels(ignored=True)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = pipe.step(tokens, target=labels).item()
        assert loss == pytest.approx(plain_step(other, tokens, labels, 2), rel=tolerance)
        for optimizer in optimizers:
            optimizer.step()
        assert difference(model, other) < tolerance
    assert pipe.schedule.n_slices == pipe.program.n_slices == n_slices


@pytest.mark.parametrize("dispatch", ["threads", "auto"])
def test_threads_give_the_same(dispatch: str) -> None:
    torch.manual_seed(0)
    model = Decoder().double()
    other = copy.deepcopy(model)
    pipe = sliced(model, 3, 4, checkpoint="always", dispatch=dispatch)
    for _ in range(3):
        tokens, labels = tokens_and_labels()
        pipe.step(tokens, target=labels)
        plain_step(other, tokens, labels, 2)
    assert difference(model, other) < 1e-10


@pytest.mark.parametrize("cut", ["blocks.1", "blocks.1.out", "blocks.1.up", "head"])
def test_the_cut_may_be_anywhere(cut: str) -> None:
    torch.manual_seed(0)
    model = Decoder().double()
    other = copy.deepcopy(model)
    tokens, labels = tokens_and_labels()
    sliced(model, 2, 4, split_before=[cut]).step(tokens, target=labels)
    plain_step(other, tokens, labels, 2)
    assert difference(model, other) < 1e-10


def test_calls_and_evaluation_run_whole_sequences() -> None:
    model, (tokens, labels) = Decoder(), tokens_and_labels()
    pipe = sliced(model, 2, 4)
    torch.testing.assert_close(pipe(tokens), model(tokens))
    loss = pipe.step(tokens, target=labels)
    torch.testing.assert_close(pipe.evaluate([(tokens, labels)]).loss, loss.item(), rtol=1e-5, atol=0.0)
    with torch.no_grad():
        torch.testing.assert_close(pipe.step(tokens, target=labels), loss)
    torch.testing.assert_close(pipe.step(tokens, target=labels), loss)


def test_another_length_and_another_schedule() -> None:
    torch.manual_seed(0)
    model = Decoder().double()
    other = copy.deepcopy(model)
    pipe = sliced(model, 2, 4)
    batches = [tokens_and_labels(length=length) for length in (16, 8, 16)]
    for tokens, labels in batches:
        pipe.step(tokens, target=labels)
        plain_step(other, tokens, labels, 2)
    pipe.reschedule("1f1b", 2)
    pipe.step(*batches[0][:1], target=batches[0][1])
    plain_step(other, *batches[0], 2)
    pipe.reschedule(pc.build_schedule("terapipe", 2, 2, n_slices=2))
    pipe.step(*batches[0][:1], target=batches[0][1])
    plain_step(other, *batches[0], 2)
    assert difference(model, other) < 1e-10


def test_a_scaler_and_autocast() -> None:
    torch.manual_seed(0)
    model, (tokens, labels) = Decoder(), tokens_and_labels()
    other = copy.deepcopy(model)
    pipe, scaler = sliced(model, 2, 4, check=False), torch.amp.GradScaler("cpu", init_scale=8.0)
    with torch.autocast("cpu", torch.bfloat16):
        pipe.step(tokens, target=labels, scaler=scaler)
        plain_step(other, tokens, labels, 2)
    for own, twin in zip(model.parameters(), other.parameters(), strict=True):
        assert (own.grad / 8 - twin.grad).norm() < 0.05 * twin.grad.norm()


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_slices_hold_less_memory(checkpoint: str) -> None:
    tokens, labels = tokens_and_labels(length=128)
    measured, simulated = {}, {}
    for n_slices in (1, 4):
        torch.manual_seed(0)
        model = Decoder(4, longest=128)
        pipe = sliced(model, 2, n_slices, checkpoint=checkpoint, split_before=["blocks.2"])
        pairs = peaks(pipe, lambda pipe: pipe.step(tokens, target=labels))
        simulated[n_slices], measured[n_slices] = zip(*pairs, strict=True)
    assert measured[4][0] < 0.8 * measured[1][0]
    if checkpoint == "never":
        assert measured[4][0] / measured[1][0] == pytest.approx(simulated[4][0] / simulated[1][0], rel=0.2)


def test_views_of_a_pipeline_show_slices(tmp_path: Any) -> None:
    tokens, labels = tokens_and_labels()
    pipe = sliced(Decoder(), 2, 4)
    pipe.step(tokens, target=labels)
    assert "8 slices, 4 per micro-batch" in str(pipe.program)
    names = {span.name for span in pipe.simulate().spans} & {span.name for span in pipe.measured.spans}
    assert {"0F0.0", "1B1.3"} <= names
    assert pipe.dump(tmp_path)
    assert (tmp_path / "schedule.csv").read_text().startswith("0F0.0,0F0.1")


# -- other models, and refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["gpt2", "llama"])
def test_decoders_of_transformers_run(attention: str) -> None:
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 20, "attn_implementation": "sdpa", "bos_token_id": 0, "eos_token_id": 0}
    if attention == "gpt2":
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(n_positions=32, n_embd=16, n_layer=2, n_head=2, **drops, **common)
        model = transformers.GPT2LMHeadModel(config)
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.LlamaConfig(num_key_value_heads=2, max_position_embeddings=32, **sizes, **common)
        model = transformers.LlamaForCausalLM(config)
    torch.manual_seed(0)
    model = Logits(model).double()
    other = copy.deepcopy(model)
    tokens, labels = tokens_and_labels(ignored=True)
    loss = sliced(model, 2, 4, check=False).step(tokens, target=labels)
    assert loss.item() == pytest.approx(plain_step(other, tokens, labels, 2), rel=1e-10)
    assert difference(model, other) < 1e-10


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, use_cache=False).logits


def test_a_model_is_refused_when_it_is_compiled() -> None:
    tokens, _ = tokens_and_labels()
    model = nn.Sequential(Decoder(), nn.Dropout(0.1))
    with pytest.raises(pc.PipecompileError, match="cannot run on slices of a sequence"):
        sliced(model, 2, 4, example_args=(tokens,))


def test_a_list_of_micro_batches_is_refused() -> None:
    tokens, labels = tokens_and_labels()
    with pytest.raises(pc.PipecompileError, match="microbatches is given, and the schedule divides sequences"):
        sliced(Decoder(), 2, 4).step(microbatches=[{"tokens": tokens, "target": labels}])
