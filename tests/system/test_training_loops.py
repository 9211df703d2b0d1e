"""Training loops of other libraries run with a pipeline as they do with the model: Trainer, accelerate, Lightning, peft."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import pipecompile as pc

WORDS, PADDING = 32, -100


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def loader() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(1)
    return DataLoader(
        TensorDataset(torch.randn(16, 4, generator=draw), torch.randint(3, (16,), generator=draw)), batch_size=4
    )


def compiled(model: nn.Module) -> pc.Pipeline:
    return pc.compile(model, 2, n_microbatches=2, loss_fn=cross_entropy, cost="analytic")


def language_model() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=WORDS, use_cache=False, bos_token_id=1, eos_token_id=2, **sizes)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def sentences() -> list[dict[str, torch.Tensor]]:
    """Return sentences whose labels end early, each elsewhere, so that micro-batches count different numbers of them."""
    texts = [(torch.arange(8) + i) % WORDS for i in range(8)]
    return [
        {"input_ids": text, "labels": text.masked_fill(torch.arange(8) > 2 + i % 4, PADDING)}
        for i, text in enumerate(texts)
    ]


def logged(model: nn.Module, out: Path) -> list[float]:
    """Return the losses and norms that Trainer logs in two steps, and the loss that it evaluates."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    arguments = transformers.TrainingArguments(
        str(out), per_device_train_batch_size=4, num_train_epochs=1, learning_rate=1e-2, logging_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True, remove_unused_columns=False, label_names=["labels"],
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=sentences(), eval_dataset=sentences()[:4])
    trainer.train()
    steps = [row for row in trainer.state.log_history if "grad_norm" in row]
    return [row[key] for row in steps for key in ("loss", "grad_norm")] + [trainer.evaluate()["eval_loss"]]


def test_trainer_logs_the_losses_of_the_model_and_saves_its_weights(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    model = language_model()
    pipe = compiled(copy.deepcopy(model))
    expected = logged(model, tmp_path / "model")
    assert logged(pipe, tmp_path / "pipe") == pytest.approx(expected, rel=1e-4)
    assert len(expected) == 5
    saved = safetensors.load_file(tmp_path / "pipe" / "checkpoint-2" / "model.safetensors")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-3, atol=1e-4)


def test_config_generate_and_save_pretrained_reach_a_model_of_transformers(tmp_path: Path) -> None:
    model = language_model()
    pipe, text = compiled(model), torch.tensor([[1, 5, 7]])
    assert pipe.config is model.config
    assert torch.equal(pipe.generate(text, max_new_tokens=3), model.generate(text, max_new_tokens=3))
    pipe.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_trains_as_with_the_model(precision: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    state = pytest.importorskip("accelerate.state", reason="needs accelerate")

    def losses(model: nn.Module, name: str) -> list[float]:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        model, optimizer, batches = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), loader())
        result = []
        for x, y in batches:
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            result.append(loss.item())
        weights = {key: value.clone() for key, value in accelerator.get_state_dict(model).items()}
        accelerator.save_state(str(tmp_path / name))
        nn.init.zeros_(accelerator.unwrap_model(model).get_parameter("0.weight"))
        accelerator.load_state(str(tmp_path / name))
        assert all(torch.equal(model.state_dict()[key], value) for key, value in weights.items())
        state.AcceleratorState._reset_state(reset_partial_state=True)
        return result

    assert losses(compiled(network()), "pipe") == pytest.approx(
        losses(network(), "model"), rel=1e-5 if precision == "no" else 1e-2
    )


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("by_step", [False, True])
@pytest.mark.filterwarnings("ignore")  # of Lightning: few workers, few batches
def test_lightning_fits_as_with_the_model(by_step: bool, precision: str, tmp_path: Path) -> None:
    lightning = pytest.importorskip("pytorch_lightning", reason="needs pytorch-lightning")

    class Task(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, net: nn.Module, by_step: bool) -> None:
            super().__init__()
            self.net, self.automatic_optimization, self.losses = net, not by_step, []

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x, y = batch
            if self.automatic_optimization:
                loss = cross_entropy(self.net(x), y)
            else:
                loss = self.net.step(x, target=y)
                self.optimizers().step()
                self.optimizers().zero_grad()
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("validation", cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    def fitted(net: nn.Module, by_step: bool, out: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
        task = Task(net, by_step)
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", precision=precision, logger=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=out,
        )  # fmt: skip
        trainer.fit(task, loader(), loader())
        saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)["state_dict"]
        return [*task.losses, trainer.callback_metrics["validation"].item()], saved

    expected, weights = fitted(network(), False, tmp_path / "model")
    losses, saved = fitted(compiled(network()), by_step, tmp_path / "pipe")
    tolerance = 1e-5 if precision == "32-true" else 1e-2
    assert losses == pytest.approx(expected, rel=tolerance)
    assert [*saved] == [*weights] == [f"net.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")]
    for name, value in weights.items():
        torch.testing.assert_close(saved[name], value, rtol=tolerance, atol=tolerance)


def test_lora_of_peft_trains_as_with_the_model() -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(language_model(), config)
    pipe = pc.compile(copy.deepcopy(model), 2, n_microbatches=2, loss_fn=lambda o, y: cross_entropy(o["logits"].flatten(0, 1), y.flatten()), cost="analytic")  # fmt: skip
    text = torch.arange(32).reshape(4, 8) % WORDS
    expected = cross_entropy(model(input_ids=text)["logits"].flatten(0, 1), text.flatten())
    expected.backward()
    assert pipe.step(input_ids=text, target=text) == pytest.approx(expected.item(), rel=1e-5)
    assert pipe.peft_config == model.peft_config
    theirs = dict(model.named_parameters())
    trained = {name: one for name, one in pipe.named_parameters() if one.requires_grad}
    assert trained
    assert all("lora" in name for name in trained)
    for name, one in trained.items():
        torch.testing.assert_close(one.grad, theirs[name].grad)
