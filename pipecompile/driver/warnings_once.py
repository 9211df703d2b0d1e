"""Warnings that a pipeline gives once: of the options, of a model recorded again, of a batch cut otherwise than asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from pipecompile.driver.signature import Signature
from pipecompile.errors import RecordingWarning
from pipecompile.ir import Kind
from pipecompile.options import Options
from pipecompile.runtime.cuda_graphs import capture
from pipecompile.tracing.fakes.batch_symbol import Guard
from pipecompile.tracing.guards.state_guards import ReadChange
from pipecompile.tracing.user_source import line_of, warn

__all__ = ["WarningsOnce"]

_REMEMBERED = 64
"""Signatures of dropped recordings that are remembered, to notice a model that is recorded again and again."""


class WarningsOnce:
    """One warning for each line of the user that branches on the batch size, and one for each other kind."""

    def __init__(self) -> None:
        self._given: set[tuple[str, str]] = set()
        self._evicted: deque[Signature] = deque(maxlen=_REMEMBERED)
        self._delayed: dict[str, tuple[str, Callable[[], object] | None]] = {}
        self.counted: set[int | str | None] = set()

    def check_options(self, options: Options) -> None:
        """Warn of options that have no effect together."""
        self.undivided(options)
        if not options.cuda_graphs:
            return
        if kinds := {device.type for device in options.devices if capture.graph_captures(device) is None}:
            warn(
                f"cuda_graphs={options.cuda_graphs!r}: there are no graphs on {' and '.join(sorted(kinds))}, whose stages run as they are",
                RecordingWarning,
            )

    def undivided(self, options: Options) -> None:
        """Warn if the schedule splits the backward of stages that cannot split it: compiled stages and CUDA graphs."""
        whole = "compiled stage" if options.compile_stages else "CUDA graph" if options.cuda_graphs is True else ""
        if whole and Kind.INPUT_GRAD in options.kinds:
            off = "compile_stages" if options.compile_stages else "cuda_graphs"
            self.once(
                "undivided",
                f"the schedule splits backwards, and a {whole} computes all its gradients at once: all in I, W does nothing."
                f" Try schedule='1f1b', or {off}=False",
            )

    def estimated(self, device: torch.device) -> None:
        """Warn that costs are estimated, since the model does not fit on the device where they would be measured."""
        self.once(
            "estimated",
            f"the model does not fit on {device}, where its operations would be measured: costs are estimated from data sheets."
            ' Try compile(..., cost="analytic") to say so, or costs={"layer": seconds}',
        )

    def anew(self, signature: Signature, guard: Guard | None, samples: int, limit: int) -> None:
        """Warn that the model is recorded again: because `guard` fails for `samples` samples, or because the cache is small."""
        if guard is not None:
            self._at(guard, "anew", f"recorded anew for micro-batches of {samples} samples")
        elif signature in self._evicted:
            self.once(
                "small",
                f"inputs of more kinds than the {limit} recordings that are kept: some are recorded again and again."
                f" Try compile(..., cache_size={2 * limit}); pipe.explain() shows what differs",
            )

    def changing(self, label: str, place: str, why: str, kept: str = "") -> None:
        """Warn of a value that changes between steps: the piece `kept` is kept whole, or the model is recorded anew every time."""
        where = f", read at {place.partition(':  ')[0]}," if place else ""
        does = (
            f"{kept} is kept whole, and cannot be cut"
            if kept
            else f"the model is recorded anew at every change, because {why}"
        )
        hint = (
            "Freeze parameters before compile, or seldom: each set of frozen ones has a recording of its own"
            if label.endswith(".requires_grad")
            else "Try a buffer instead: self.register_buffer(name, torch.tensor(value)), changed by fill_ or copy_, and no decision of"
            " Python on its value"
        )
        self.once(f"changing {label}", f"{label}{where} changes between steps: {does}. {hint}")

    def outdated(self, changes: Sequence[ReadChange]) -> None:
        """Warn that a step has changed what its recording reads: micro-batches computed with the value from before the step."""
        for change in changes:
            where = f" at {line_of(change.place)}" if change.place else ""
            key = "outdated", change.label
            if key not in self._given:
                self._given.add(key)
                warn(
                    f"{change.label} was changed in a step, by a piece of the model that is kept whole, and is read{where} in the rest:"
                    " there, all micro-batches have the value from before the step. Try to return it from the piece, or to read it in the piece",
                    RecordingWarning,
                )

    def uneven(self, guard: Guard, wanted: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        """Warn that a batch goes into other micro-batches than asked for, because those are on both sides of a branch."""
        both = " and ".join(map(str, sorted(set(wanted))))
        text = f"{sum(wanted)} samples go into {_micro_batches(len(sizes))} instead of {len(wanted)} of {both} samples"
        self._at(guard, "uneven", text)

    def whole(self, guard: Guard, samples: int) -> None:
        """Warn that the micro-batches of pipe(x) take another way at this line than the whole mini-batch would."""
        text = f"pipe(x) goes the way of micro-batches, and {samples} samples at once go another. Try n_microbatches=1"
        self._at(guard, "whole", text)

    def unequal(self, samples: int, wanted: int, count: int) -> None:
        """Warn that lists with an entry per sample go into fewer micro-batches, so that all are equally long."""
        if count < min(wanted, samples):
            text = f"lists of {samples} samples go into {_micro_batches(count)} instead of {wanted}"
            self.once("unequal", f"{text}, so that all have equally many")

    def fewer(self, samples: int | None, wanted: int | str | None) -> None:
        """Warn if the first mini-batch for a number of micro-batches has fewer samples. Later ones may, as the last of an epoch does."""
        self.counted.add(wanted)
        if isinstance(wanted, int) and samples is not None and samples < wanted:
            size = f"{samples} sample{'s' * (samples != 1)}"
            text = (
                f"n_microbatches={wanted}, and the mini-batch has {size}: there will be {samples}, of one sample each"
            )
            warn(f"{text}. Try n_microbatches={max(1, samples // 2)}, or a larger batch", RecordingWarning)

    def single(self, wanted: tuple[int, ...], sizes: tuple[int, ...], layer: str) -> None:
        """Warn that a batch goes into fewer micro-batches, since a BatchNorm layer cannot normalise a single value."""
        text = f"{sum(sizes)} samples go into {_micro_batches(len(sizes))} instead of {len(wanted)}"
        why = f"of a micro-batch of one sample, a single value per channel would reach the BatchNorm layer {layer}"
        self.once("single", f"{text}: {why}, which refuses to normalise it")

    def offsets(self, found: Sequence[tuple[str, bool]]) -> None:
        """Warn of inputs that look like offsets of packed sequences, by name, each with whether it is cut like samples."""
        for name, is_cut in found[:1]:
            does = "is cut into micro-batches like samples" if is_cut else "is the same in all micro-batches, which have parts of the sequences"  # fmt: skip
            other = f'batch_dims={{"{name}": None}}) if all samples share it' if is_cut else "n_microbatches=1)"
            self.once(
                "offsets",
                f"{name} looks like offsets of packed sequences, and {does}. Try compile(...,"
                f' split={{"{name}": "offsets"}}), which keeps sequences whole; or compile(..., {other}',
            )

    def mixed(self, places: Sequence[str]) -> None:
        """Warn that samples of a batch meet at these lines: in micro-batches, only those of one micro-batch do."""
        if places:
            self.once(
                "mixed",
                f"samples of a batch meet at {places[0]}: in micro-batches, only those of the same one."
                ' Try compile(..., schedule="gpipe", across_batch="exact"), by which all of the mini-batch meet; across_batch="each" keeps'
                ' this behaviour and silences the warning. If dimension 0 is not the batch, say so: compile(..., batch_dims={"name": 1})',
            )

    def unproven(self, line: str) -> None:
        """Warn that rows of an output are joined though the operations at this line could not be tried."""
        self.once(
            "unproven",
            f"an output is joined from micro-batches by its number of rows: the operations behind {line} could not be tried, so"
            " that they keep samples apart is not proven. Try n_microbatches=1 and compare",
        )

    def deciding(self, line: str) -> None:
        """Warn that micro-batches may take another way at this line than the whole mini-batch would."""
        self.once(
            "deciding",
            f"Python decides at {line} by values of its samples: in pipe(x), by those of each micro-batch, and may go another way than"
            " the model on the whole mini-batch. Try n_microbatches=1, or pipe.model(x); on several ranks that has the trained weights of its"
            " own stages alone, until pipe.model.load_state_dict(pipe.full_state_dict())",
        )

    def doubtful(self, difference: str) -> None:
        """Warn that the first check of a recording found a difference that roundings may explain."""
        self.once(
            "doubtful",
            f"the recording does not give the bits of the model: {difference}. Roundings explain this, if a library takes"
            " another way while it is recorded (an attention mask for a mask of ones); so does a constant that changed a little."
            " To know, compare in double precision",
        )

    def outside_stages(self, line: str, operations: int, options: Options) -> None:
        """Warn that a part of the model with parameters runs on the whole mini-batch."""
        is_exact = options.across_batch == "exact"
        runs = "pipe(x) and step run" if is_exact else "pipe(x) runs"
        others = "" if is_exact else ". step runs them in micro-batches, where only samples of the same one meet"
        text = f"samples of a batch meet at {line}: {runs} the {operations} operations behind it on the whole mini-batch, after the stages"
        self.once("outside", text + others)

    def summed(self) -> None:
        """Warn that a loss is a sum over samples, and was declared a mean."""
        self.once(
            "summed",
            "the loss is a sum over the samples, and loss_reduction='mean' averages the micro-batches' losses."
            " Try compile(..., loss_reduction='sum')",
        )

    def undivided_loss(self, forget: Callable[[], object], line: str = "") -> None:
        """Warn that the loss is not a mean over samples as far as is known, nor a mean over what is known before the forward.

        `line` is where samples meet. `forget` drops the analysis that says so.
        """
        meet = f" (samples meet at {line})" if line else ""
        self._after_step(
            "undivided loss",
            f"the loss was not recognised{meet} as a mean or a sum over samples, nor as a mean over what targets and inputs"
            " count: micro-batches may change it, and are weighted by samples. Try n_microbatches=1 and compare; or compile(...,"
            ' schedule="gpipe", across_batch="exact"), which computes the loss once, of the whole mini-batch; or a sum, with the divisor'
            " of the whole mini-batch:\n"
            "    pc.compile(..., loss_reduction='sum', loss_fn=lambda output, target: loss_sum(output, target) / divisor[0])\n"
            "    divisor[0] = count(target); pipe.step(x, target=target)",
            forget,
        )

    def uncounted_loss(self) -> None:
        """Warn that micro-batches of a list are weighted by samples, because what their loss counts is not known."""
        self._after_step(
            "uncounted loss",
            "what the loss divides by cannot be found: the micro-batches of a list are weighted by their samples, whatever their"
            " lengths. Try a sum, with the divisor of the whole step:\n"
            "    pc.compile(..., loss_reduction='sum', loss_fn=lambda output, target: loss_sum(output, target) / divisor[0])\n"
            "    divisor[0] = sum(map(count, targets)); pipe.step(microbatches=[...])",
        )

    def uncounted_copies(self) -> None:
        """Warn that copies of the pipeline are weighted by samples, because what their loss counts is not known."""
        self._after_step(
            "uncounted copies",
            "what the loss divides by cannot be found: the copies of the pipeline are weighted by their samples. Try a loss that"
            " can be recorded (no .item(), no NumPy, no y[mask]); or loss_reduction='sum', with a divisor of all copies",
        )

    def normalised(self, layers: int) -> None:
        """Warn that the `layers` BatchNorm layers update their running statistics at every micro-batch."""
        if layers:
            subject = "a BatchNorm layer updates its" if layers == 1 else f"{layers} BatchNorm layers update their"
            self.once(
                "normalised",
                f"{subject} running statistics once per micro-batch, so they move several times in a step."
                " Try compile(..., batch_norm='deferred'), once a step; or pass batch_norm='each' to keep this behaviour and"
                " silence the warning",
            )

    def rewritten(self, places: Sequence[str]) -> None:
        """Warn that the user's own checkpointing writes tensors of the model again at these lines."""
        if places:
            self.once(
                "rewritten",
                f"a region of torch.utils.checkpoint writes buffers of the model at {places[0]}, and its recomputation writes them"
                " again, as often as in eager. With several micro-batches in flight, the writes come in the order of the schedule,"
                " not one micro-batch after the other. Try compile(..., batch_norm='deferred') if these are running statistics; else n_microbatches=1",
            )

    def drawn(self, text: str) -> None:
        """Warn with this text, if any, that random numbers are drawn in another order than in the plain loop over micro-batches."""
        if text:
            self.once("drawn", text)

    def evicted(self, signature: Signature) -> None:
        """Remember that a recording was dropped to make room."""
        self._evicted.append(signature)

    def once(self, kind: str, text: str) -> None:
        """Give a warning, if none of its kind was given."""
        if (kind, "") not in self._given:
            self._given.add((kind, ""))
            warn(text, RecordingWarning)

    def _after_step(self, kind: str, text: str, forget: Callable[[], object] | None = None) -> None:
        """Keep a warning until the step has run: a loss function that raises is not a loss to warn of. `forget` is called if the step
        fails.
        """
        self._delayed.setdefault(kind, (text, forget))

    def give_delayed(self) -> None:
        """Give the warnings that were kept until the end of the step."""
        while self._delayed:
            kind, (text, _) = self._delayed.popitem()
            self.once(kind, text)

    def drop_delayed(self) -> None:
        """Drop the warnings of a step that failed, and what they were about, which is then analysed again."""
        while self._delayed:
            _, forget = self._delayed.popitem()[1]
            if forget is not None:
                forget()

    def _at(self, guard: Guard, kind: str, consequence: str) -> None:
        key = kind, guard.place or str(guard)
        if key not in self._given:
            self._given.add(key)
            where = f" at {guard.place}" if guard.place else ""
            text = f"the model branches on the batch size{where} ({guard}): {consequence}; this warning comes once"
            warn(text, RecordingWarning)


def _micro_batches(count: int) -> str:
    return "one micro-batch" if count == 1 else f"{count} micro-batches"
