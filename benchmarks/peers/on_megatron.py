"""Megatron-Core: stages that are written by hand, under its 1F1B, with CUDA replaced by the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from cuda_as_cpu import pretend
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from models import LENGTH, PARTS, SAMPLES, TIMEOUT, WIDTH, Net, NotAsked, loss_of
from torch import nn

PACKAGES = ("megatron-core", "torch")


class Part(nn.Module):
    """Layers of one stage; the schedule gives it the value of the stage before."""

    def __init__(self, model: Net, config: TransformerConfig, number: int, count: int) -> None:
        super().__init__()
        self.config, self.received, self.model_type = config, None, ModelType.encoder_or_decoder
        size = 4 // count
        if number == 0:
            self.tok_embeddings = model.tok_embeddings
        self.layers = nn.ModuleDict({str(i): model.layers[i] for i in range(number * size, (number + 1) * size)})
        if number == count - 1:
            self.norm, self.lm_head = model.norm, model.lm_head

    def set_input_tensor(self, value: torch.Tensor | list[torch.Tensor]) -> None:
        self.received = value[0] if isinstance(value, list) else value

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(words) if hasattr(self, "tok_embeddings") else self.received
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(self.norm(x)) if hasattr(self, "norm") else x


class Peer:
    def __init__(self, kind: str, *, looped: bool = False, copies: bool = False, sharded: bool = False) -> None:
        if kind != "plain" or copies or sharded:
            raise NotAsked("not tried")
        dist.init_process_group("gloo", timeout=TIMEOUT)
        pretend()
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2 if looped else None
        )
        config = TransformerConfig(
            num_layers=4,
            hidden_size=WIDTH,
            num_attention_heads=1,
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=2 if looped else None,
            pipeline_dtype=torch.float32,
            variable_seq_lengths=not looped,
            moe_token_dispatcher_type="alltoall",  # the default refuses variable lengths
        )
        rank, count, model = dist.get_rank(), 4 if looped else 2, Net(kind)
        self.parts = [Part(model, config, number, count) for number in range(rank, count, 2)]
        self.run, self.looped = get_forward_backward_func(), looped

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        for part in self.parts:
            part.zero_grad()

        def forward(batches: Iterator[tuple[torch.Tensor, torch.Tensor]], part: Part) -> tuple[torch.Tensor, object]:
            words, target = next(batches)
            return part(words), lambda logits: (loss_of(logits, target), {})

        def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            return iter(zip(x.tensor_split(PARTS), y.tensor_split(PARTS), strict=True))

        self.run(
            forward_step_func=forward,
            data_iterator=[batches() for _ in self.parts] if self.looped else batches(),
            model=self.parts if self.looped else self.parts[0],
            num_microbatches=PARTS,
            seq_length=SAMPLES // PARTS,  # the first dimension of what goes from stage to stage
            micro_batch_size=LENGTH,
            forward_only=False,
        )

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad for part in self.parts for name, p in part.named_parameters() if p.grad is not None}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for part in self.parts for name, p in part.named_parameters()}
