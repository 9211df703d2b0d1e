"""BatchNorm across the replicas of a pipeline: deferred statistics of the whole batch, and checks of SyncBatchNorm layers.

replica 0    n, mean, squared deviations of its part  ─┐
replica 1    n, mean, squared deviations of its part  ─┴─► n, mean, squared deviations of the batch, on both, once a step
replica 2    no samples: n = 0                         ─┘

Parts are merged as by Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import cast

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from pipecompile.distributed.collectives import CollectiveGroup
from pipecompile.errors import InputError
from pipecompile.graph.cross_sample import is_synchronized
from pipecompile.runtime.cells.batch_moments import BatchMoments
from pipecompile.runtime.cells.deferred_batchnorm import DeferredCall, DeferredNorm, DeferredNorms
from pipecompile.torch_private.modules import BatchNorm, InstanceNorm, NormBase, sync_check_input_dim

__all__ = ["ReplicatedNorms", "check_sync_groups", "sync_batchnorm_layers", "synchronised_line", "without_sync"]


def sync_batchnorm_layers(model: nn.Module) -> dict[str, nn.SyncBatchNorm]:
    """Return, by name, the layers of a model that exchange statistics with other processes."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)}
    return {name: layer for name, layer in layers.items() if is_synchronized(layer)}


def synchronised_line(model: nn.Module) -> str:
    """Return why copies of the pipeline must run one program: layers that exchange statistics in it; "" if there are none."""
    layers = [name for name, layer in sync_batchnorm_layers(model).items() if layer.training]
    return f"SyncBatchNorm layer {layers[0]} exchanges statistics in every micro-batch" if layers else ""


def check_sync_groups(layers: dict[str, nn.SyncBatchNorm], replicas: dist.ProcessGroup | None) -> None:
    """Raise InputError for a layer whose process group has other ranks than those that run its stage."""
    with_stage = {dist.get_rank()} if replicas is None else set(dist.get_process_group_ranks(replicas))
    for name, layer in layers.items():
        in_group = set(dist.get_process_group_ranks(layer.process_group or dist.group.WORLD))
        if in_group != with_stage:
            raise InputError(
                f"a SyncBatchNorm layer is of ranks {sorted(in_group)}",
                where=name,
                why=f"ranks {sorted(with_stage)} run its stage; the layer would wait for the others forever",
                hint='nn.SyncBatchNorm.convert_sync_batchnorm(model, mesh.get_group("dp"))',
            )


class LocalBatchNorm(BatchNorm):
    """A SyncBatchNorm layer that normalises by the samples of this process only."""

    _check_input_dim = sync_check_input_dim


LocalBatchNorm.__module__ = (
    nn.SyncBatchNorm.__module__
)  # the recorder takes it for a layer of torch, as SyncBatchNorm is


@contextmanager
def without_sync(layers: Sequence[nn.SyncBatchNorm]) -> Iterator[None]:
    """Let layers compute without other processes in this context: while a model is recorded or measured."""
    kinds = [type(layer) for layer in layers]
    try:
        for layer in layers:
            layer.__class__ = LocalBatchNorm  # type: ignore[assignment]
        yield
    finally:
        for layer, kind in zip(layers, kinds, strict=True):
            layer.__class__ = kind


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """A call of a layer that a replica has observed, for replicas that have not.

    `place` is its number among the calls of the layer in one forward. `counted` is by how much one forward raises the layer's
    counter, and `repeats` how often the user's own checkpointing has recomputed the call.
    """

    name: str
    place: int
    channels: int
    momentum: float | None
    counted: int
    repeats: int

    @classmethod
    def of(cls, norm: DeferredNorm, place: int, name: str) -> ObservedCall:
        """Return call number `place` of a layer called `name`, which has observed values."""
        call, count, runs = norm.calls[place], norm.layer.num_batches_tracked, max(one.runs for one in norm.calls)
        assert call.seen is not None
        counted = 0 if count is None or norm.batches is None else int(count - norm.batches) // runs
        return cls(name, place, len(call.seen.mean), call.momentum, counted, call.repeats // call.runs)

    def repeated(self, layer: NormBase, seen: BatchMoments, *, is_counted: bool) -> DeferredNorm:
        """Return the layer with this call, which has observed the values of other replicas."""
        norm = DeferredNorm(layer)
        norm.begin()
        call = norm.new_call()
        call.seen, call.momentum, call.runs, call.repeats = seen, self.momentum, 1, self.repeats
        if is_counted and layer.num_batches_tracked is not None:
            layer.num_batches_tracked.data.add_(self.counted)
        return norm


class ReplicatedNorms(DeferredNorms):
    """The deferred layers of one build. All `replicas` observe the same layers: those of this rank's stages.

    `unlike_model` returns the model in a step in which the replicas run different programs, else None. They may then have observed
    other layers, or none without a sample: the layers are found by name.
    """

    def __init__(
        self,
        norms: DeferredNorms,
        replicas: CollectiveGroup,
        unlike_model: Callable[[], nn.Module | None] = lambda: None,
    ) -> None:
        super().__init__(norms.norms, norms.links)
        self.replicas, self.unlike_model = replicas, unlike_model

    def settle(self) -> None:
        """Merge the statistics of all replicas, then update the running statistics."""
        with torch.inference_mode(False), torch.no_grad():
            self.merge()
            if (model := self.unlike_model()) is not None:
                self._settle_by_name(model)
            elif updated := [(call, call.seen) for norm in self.norms for call in norm.calls if call.seen is not None]:
                rows = self.replicas.all_gather(torch.cat([_row(seen) for _, seen in updated]))
                parts = _by_layer(rows, [1 + 2 * len(seen.mean) for _, seen in updated])
                for (call, _), (part, total) in zip(updated, parts, strict=True):
                    call.seen = _moments(call.layer, part, total)
        super().settle()

    def _settle_by_name(self, model: nn.Module) -> None:
        """Merge the statistics by the names of layers, and update the layers that only other replicas have observed."""
        names, own = {id(module): name for name, module in model.named_modules()}, dict[tuple[str, int], DeferredCall]()
        mine: list[ObservedCall] = []
        for norm in self.norms:
            for place, call in enumerate(norm.calls):
                if call.seen is not None:
                    mine.append(ObservedCall.of(norm, place, names[id(norm.layer)]))
                    own[mine[-1].name, place] = call
        texts = self.replicas.all_gather_text(msgspec.json.encode(mine).decode())
        all_calls = {(one.name, one.place): one for text in texts for one in _calls_in(text)}
        if not all_calls:
            return
        nothing = {key: _no_row(one.channels) for key, one in all_calls.items()}
        parts = [_row(own[key].seen) if key in own else row for key, row in nothing.items()]  # type: ignore[arg-type]
        rows = self.replicas.all_gather(torch.cat([part.cpu() for part in parts]))
        columns = _by_layer(rows, [len(row) for row in nothing.values()])
        counted = {name for name, _ in own}
        for (key, one), (column, total) in zip(all_calls.items(), columns, strict=True):
            layer = cast(NormBase, model.get_submodule(one.name))
            seen = _moments(layer, column, total)
            if key in own:
                own[key].seen = seen
            else:
                one.repeated(layer, seen, is_counted=one.name not in counted).settle()
                counted.add(one.name)

    def share(self, home: Iterable[torch.Tensor]) -> None:
        """Take the buffers of layers that other replicas alone have run, where the layer has its home on another rank than its stage.

        `home` are the tensors that came home to this rank. A layer has the same home in all replicas, and its statistics are merged.
        """
        if (model := self.unlike_model()) is None:
            return
        deferred = {id(buffer) for norm in self.norms for buffer in norm.layer.buffers()} & {*map(id, home)}
        buffers = dict(model.named_buffers())
        own = [name for name, buffer in buffers.items() if id(buffer) in deferred]
        texts = self.replicas.all_gather_text(msgspec.json.encode(own).decode())
        lists: list[list[str]] = [msgspec.json.decode(text, type=list[str]) for text in texts]
        names = sorted({*chain(*lists)} - {*lists[0]}.intersection(*lists[1:]))
        if not names:
            return
        with torch.inference_mode(False), torch.no_grad():
            rows = self.replicas.all_gather(torch.cat([buffers[name].cpu().double().reshape(-1) for name in names]))
            columns = rows.split_with_sizes([buffers[name].numel() for name in names], 1)
            for name, column in zip(names, columns, strict=True):
                source = next(place for place, each in enumerate(lists) if name in each)
                if name not in own:
                    buffers[name].data.copy_(column[source].view(buffers[name].shape))


def _no_row(channels: int) -> torch.Tensor:
    """Return the row of statistics of no samples."""
    return torch.zeros(1 + 2 * channels, dtype=torch.float64, device="cpu")


def _calls_in(text: str) -> list[ObservedCall]:
    return msgspec.json.decode(text, type=list[ObservedCall])


def _by_layer(rows: torch.Tensor, widths: Sequence[int]) -> Iterator[tuple[torch.Tensor, float]]:
    """Return the columns of each layer, and the count of all replicas. A GPU is waited for once."""
    parts = rows.split_with_sizes([*widths], 1)
    return zip(parts, torch.stack([part[:, 0] for part in parts]).sum(1).tolist(), strict=True)


def _moments(layer: NormBase, rows: torch.Tensor, total: float) -> BatchMoments:
    """Return the statistics of one layer over all replicas, from a row as in `_merged`."""
    rows = rows.to(layer.running_mean.device) if layer.running_mean is not None else rows
    return _averaged(rows, total) if isinstance(layer, InstanceNorm) else _merged(rows, total)


def _row(seen: BatchMoments) -> torch.Tensor:
    """Return count, means and squared deviations as `(1 + 2 * channels,)`."""
    return torch.cat([seen.mean.new_tensor([seen.count]), seen.mean, seen.spread])


def _averaged(rows: torch.Tensor, total: float) -> BatchMoments:
    """Average the statistics of one InstanceNorm layer, from a row as in `_merged`."""
    shares = rows[:, :1] / total
    mean, variance = (shares * rows[:, 1:]).sum(0).chunk(2)
    return BatchMoments(total, mean, variance)


def _merged(rows: torch.Tensor, total: float) -> BatchMoments:
    """Merge the statistics of one layer, from a row `(replicas, 1 + 2 * channels)` of each replica, of `total` values together."""
    channels = rows.shape[1] // 2
    counts, means, spreads = rows.split_with_sizes([1, channels, channels], 1)
    mean = (counts * means).sum(0) / total
    return BatchMoments(total, mean, spreads.sum(0) + (counts * (means - mean).square()).sum(0))
