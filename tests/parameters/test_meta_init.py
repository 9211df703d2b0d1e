from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import pipecompile as pc

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

X = torch.randn(8, 6)


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


class Block(nn.Module):
    """Its constructor computes `scale`, and makes `gain` without a method that would do so again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.gain = nn.Parameter(torch.full((6,), 2.0))
        self.register_buffer("scale", torch.arange(6.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.linear(x))) * self.gain + self.scale


class Tied(nn.Module):
    """The first and the last layer have one weight; `spare` is in no stage; `start` is the model's own."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.first, self.last, self.spare = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(2, 2)
        self.last.weight = self.first.weight
        self.start, self.end = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(6))
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.start)
        nn.init.normal_(self.end)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + self.start
        for block in self.blocks:
            x = block(x)
        return self.last(x) + self.end


def finish(module: nn.Module) -> None:
    if isinstance(module, Block):
        module.gain.fill_(2.0)
        module.scale.copy_(torch.arange(6.0))


def on_meta(make: Any = Tied) -> nn.Module:
    with torch.device("meta"):
        return make()


def compiled(model: nn.Module, n_stages: int = 3, **options: Any) -> pc.Pipeline:
    return pc.compile(model, n_stages, devices=["cpu"] * n_stages, loss_fn=square, n_microbatches=2, example_args=(X,),
                      batch_norm="each", **options)  # fmt: skip


INIT = ["reset_parameters", finish]


def test_a_model_on_meta_trains_like_one_that_was_not() -> None:
    """Its plan is that of the real one as well; the recording is made where it will run."""
    model = on_meta()
    known = {name: id(parameter) for name, parameter in model.named_parameters()}
    pipe = compiled(model, init=INIT)
    assert {name: id(parameter) for name, parameter in pipe.named_parameters()} == known
    assert model.first.weight is model.last.weight
    assert pipe.graph.facts.device == torch.device("cpu")
    assert pipe.plan.cost == "analytic"
    eager = Tied()
    eager.load_state_dict(pipe.state_dict())
    real = compiled(copy.deepcopy(eager), cost="analytic")
    assert real.plan == pipe.plan
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (pipe, real)]
    for _ in range(2):
        losses = [each.step(X).item() for each in (pipe, real)]
        assert losses[0] == losses[1]
        for optimizer in optimizers:
            optimizer.step()
    pipe.eval(), eager.eval()
    eager.load_state_dict(pipe.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(pipe(X), eager(X))


def test_numbers_are_the_same_in_every_cut_and_others_for_the_next_model() -> None:
    states = []
    for n_stages in (2, 4):
        torch.manual_seed(3)
        for _ in range(2):
            states.append(compiled(on_meta(), n_stages, init=INIT).state_dict())
        states[-1]["drawn"] = torch.rand(1)
    first, second, again, _ = states
    assert all(torch.equal(again[name], value) for name, value in first.items())
    assert torch.equal(states[1]["drawn"], states[3]["drawn"])
    assert not torch.equal(first["first.weight"], second["first.weight"])
    assert not torch.equal(first["first.weight"], first["blocks.0.linear.weight"])
    assert not torch.equal(first["start"], first["end"])


def test_what_nobody_fills_is_named_what_checkpoints_lack_first() -> None:
    missing = (
        r"where  blocks.0.scale \(a buffer outside state_dict\), .*, blocks.0.gain, blocks.1.gain, blocks.2.gain\n"
    )
    with pytest.raises(pc.InputError, match=missing) as caught:
        compiled(on_meta(), init="reset_parameters")
    assert "6 tensors of the model have no values" in str(caught.value)
    assert "values computed by its constructor have to be computed again" in str(caught.value)
    pipe = compiled(on_meta())
    for call in (lambda: pipe.step(X), lambda: pipe(X)):
        with pytest.raises(pc.InputError, match="34 tensors of the model have no values"):
            call()


def test_values_may_be_loaded_or_written_before_the_first_step() -> None:
    source = Tied()
    pipe = compiled(on_meta())
    pipe.load_state_dict(source.state_dict())
    with pytest.raises(pc.InputError, match="3 tensors of the model have no values"):
        pipe.step(X)
    with torch.no_grad():
        pipe.apply(finish)
    assert pipe.step(X).item() == compiled(source, cost="analytic").step(X).item()


@pytest.mark.parametrize("form", ["dcp", "safetensors", "one file"])
def test_a_checkpoint_is_read(form: str, tmp_path: Path) -> None:
    source = Tied()
    if form == "dcp":
        dcp.save({"model": source.state_dict()}, checkpoint_id=tmp_path / "out", no_dist=True)
    else:
        (tmp_path / "out").mkdir()
        tensors = {
            name: value for name, value in source.state_dict().items() if name != "first.weight"
        }  # as tied ones are
        pytest.importorskip("safetensors.torch").save_file(tensors, tmp_path / "out" / "model.safetensors")
    path = tmp_path / "out" / ("model.safetensors" if form == "one file" else "")
    model = on_meta()
    pipe = compiled(model, init=[str(path), finish])
    assert all(
        torch.equal(value, source.state_dict()[name]) for name, value in pipe.state_dict().items() if "gain" not in name
    )
    assert model.first.weight is model.last.weight


def test_what_is_no_source_of_values_is_told_at_once(tmp_path: Path) -> None:
    for init, message in (
        (5, "init is an int"),
        (["reset_parameters", 5], "init is an int"),
        ("reset", "reset does not exist"),
        (tmp_path, f"{re.escape(str(tmp_path))} is not a checkpoint"),
    ):
        with pytest.raises(pc.InputError, match=message):
            compiled(on_meta(), init=init)
    with pytest.raises(pc.InputError, match="no tensor of the model is on meta"):
        compiled(Tied(), init="reset_parameters")
    with pytest.raises(pc.InputError, match=r'(?s)only real tensors can be measured.*cost="analytic"'):
        compiled(on_meta(), init=INIT, cost="profile")


def test_a_module_that_fails_is_named() -> None:
    def fails(module: nn.Module) -> None:
        if type(module).__name__ == "BatchNorm1d":
            raise ValueError("not that one")

    with pytest.raises(pc.InputError, match=r"(?s)where  blocks.0.norm, a BatchNorm1d.*ValueError: not that one"):
        compiled(on_meta(), init=fails)


def test_what_had_values_keeps_them() -> None:
    """Adapters that were built on the CPU, around a base on meta."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.adapter = nn.Linear(6, 6, device="meta"), nn.Linear(6, 6)

        def reset_parameters(self) -> None:
            nn.init.zeros_(self.adapter.weight)
            self.base.reset_parameters()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.adapter(x)

    model = Adapted()
    before = model.adapter.weight.clone()
    pipe = compiled(model, 2, init="reset_parameters")
    assert torch.equal(model.adapter.weight, before)
    assert pipe.step(X).isfinite()


def test_the_methods_of_models_around_a_module_are_known() -> None:
    """As of transformers and others: `_init_weights(module)` of the nearest model, after the module's own method."""

    class Model(nn.Module):
        def __init__(self, value: float, inner: nn.Module | None = None) -> None:
            super().__init__()
            self.linear, self.norm, self.value, self.inner = nn.Linear(6, 6), nn.LayerNorm(6), value, inner

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, self.value)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.linear(x))
            return x if self.inner is None else self.inner(x)

    model = on_meta(lambda: Model(1.0, Model(2.0)))
    compiled(model, 2, init="reset_parameters")
    assert model.linear.weight.unique().tolist() == [1.0]
    assert model.inner.linear.weight.unique().tolist() == [2.0]
    assert model.norm.weight.unique().tolist() == [1.0]


def test_a_method_may_make_a_tensor_anew() -> None:
    """As timm's masks of shifted windows: what is computed goes into the buffer that the stages know."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.reset_parameters()

        def reset_parameters(self) -> None:
            self.register_buffer("mask", torch.arange(6.0), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.mask

    model = on_meta(lambda: nn.Sequential(Masked(), Masked()))
    masks = [model[0].mask, model[1].mask]
    pipe = compiled(model, 2, init="reset_parameters")
    assert [part.mask is mask for part, mask in zip(model, masks, strict=True)] == [True, True]
    eager = nn.Sequential(Masked(), Masked())
    eager.load_state_dict(pipe.state_dict())
    torch.testing.assert_close(pipe(X), eager(X))


def test_recurrent_layers_know_their_weights() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(6, 6, batch_first=True), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(x)[0])

    model, x = on_meta(Recurrent), torch.randn(4, 3, 6)
    pipe = pc.compile(
        model, 2, devices=["cpu"] * 2, loss_fn=square, example_args=(x,), n_microbatches=1, init="reset_parameters"
    )
    eager = Recurrent()
    eager.load_state_dict(pipe.state_dict())
    assert pipe.step(x).item() == square(eager(x)).item()
    assert model.lstm._flat_weights[0] is model.lstm.weight_ih_l0
