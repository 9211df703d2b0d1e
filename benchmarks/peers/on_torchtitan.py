"""torchtitan: `pipeline_llm` over a model whose forward tolerates layers that are None, as its own models do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cuda_as_cpu import pretend
from models import PARTS, SAMPLES, TIMEOUT, Net, NotAsked, loss_of

PACKAGES = ("torchtitan", "torch")


class Tolerant(Net):
    """The model, written for torchtitan."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x) if self.norm is not None else x
        return self.lm_head(x) if self.lm_head is not None else x


class Peer:
    model_class: type[Net] = Tolerant

    def __init__(self, kind: str, *, looped: bool = False, copies: bool = False, sharded: bool = False) -> None:
        if copies or sharded:
            raise NotAsked("not tried")
        dist.init_process_group("gloo", timeout=TIMEOUT)
        pretend()  # its device type is "cuda" where there is no GPU
        from torchtitan.config import ParallelismConfig, TrainingConfig
        from torchtitan.distributed import ParallelDims, pipeline_parallel
        from torchtitan.tools import utils

        utils.device_type = "cpu"
        from torchtitan.distributed import parallel_dims as module

        module.device_type = "cpu"
        dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=2, ep=1, world_size=2)
        parallelism = ParallelismConfig(
            pipeline_parallel_degree=2,
            pipeline_parallel_schedule="Interleaved1F1B" if looped else "1F1B",
            pipeline_parallel_microbatch_size=SAMPLES // PARTS,
        )
        self.schedule, self.modules, self.first, self.last = pipeline_parallel.pipeline_llm(
            self.model_class(kind),
            parallel_dims=dims,
            training=TrainingConfig(local_batch_size=SAMPLES, seq_len=4),
            parallelism=parallelism,
            compile_config=None,
            ac_config=None,
            dump_folder="",
            device=torch.device("cpu"),
            model_config=SimpleNamespace(layers=[None] * 4),
            parallelize_fn=lambda model, **_: model,
            loss_fn=lambda logits, target: (loss_of(logits, target) / PARTS, None),
        )
        names = pipeline_parallel._generate_llm_fqn_per_model_part(4 if looped else 2, 4)
        self.names = [names[i] for i in range(dist.get_rank(), len(names), 2)]

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        for module in self.modules:
            module.zero_grad()
        self.schedule.step(*((x,) if self.first else ()), **({"target": y} if self.last else {}))

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters by the names of the whole model: layers are numbered anew in each stage."""
        found = {}
        for names, module in zip(self.names, self.modules, strict=True):
            layers = [name for name in names if name.startswith("layers.")]
            for name, parameter in module.named_parameters():
                head, _, rest = name.partition(".")
                index, _, end = rest.partition(".")
                found[f"{layers[int(index)]}.{end}" if head == "layers" else name] = parameter
        return found

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad for name, p in self.parameters().items() if p.grad is not None}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters().items()}

    def save(self, folder: Path, step: int) -> None:
        dcp.save({"model": dict(self.parameters())}, checkpoint_id=folder / str(step))

    def load(self, folder: Path) -> str:
        dcp.load({"model": dict(self.parameters())}, checkpoint_id=folder / "2")
        return "step 2"

    def into_eager(self, folder: Path) -> None:
        dcp.load({"model": Net("plain").state_dict()}, checkpoint_id=folder / "2", no_dist=True)
