"""The compile cache: specializations of one model, found by the signature of a call, or compiled for it.

The first specialization decides the plan. Later ones carry its cut over to their own graph; a graph that hardly does the same
as the first gets a plan of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pipecompile.batching.call_inputs import FlatInputs
from pipecompile.batching.microbatch_list import ListedBatch, MicrobatchList
from pipecompile.batching.microbatches import (
    MiniBatch,
    split_sizes,
)
from pipecompile.batching.offset_rows import offset_names
from pipecompile.batching.transformed_inputs import check_untransformed
from pipecompile.driver.backend import Backend
from pipecompile.driver.batch_split import candidate_batches, first_batch, of_two_samples, on_one_side
from pipecompile.driver.cache_report import Recordings
from pipecompile.driver.compile_context import CompileContext, CompileRequest, Decision
from pipecompile.driver.listed_programs import ListedPrograms
from pipecompile.driver.output_merge import check_whole_size, merging_specialization
from pipecompile.driver.phases import check_division, specialize
from pipecompile.driver.recording_checks import RecordingChecks, obstacle
from pipecompile.driver.signature import Signature, signature_of, signatures_of
from pipecompile.driver.specialization import Specialization
from pipecompile.driver.tables_of_model import TablesOfModel
from pipecompile.driver.unwatched import unwatched
from pipecompile.errors import InputError, PlanError
from pipecompile.graph.cross_sample import has_batch_norm
from pipecompile.options import Options
from pipecompile.tracing.guards.lifted_state import NOTHING_LIFTED
from pipecompile.tracing.state.random_states import random_states_restored, sources_beside
from pipecompile.tracing.state.tensor_attributes import warn_of_inputs

__all__ = ["CompileCache"]


class CompileCache:
    """The specializations of `model`, least recently used first; at most `options.cache_size` of them."""

    def __init__(self, model: nn.Module, options: Options, backend: Backend) -> None:
        self.model, self.options = model, options.with_choice_of(options.plan)
        self.context = CompileContext.of(model, options, backend)
        self.checks = RecordingChecks(
            model, obstacle(model, holds_model=backend.holds_model), self.context.warnings.doubtful
        )
        self.decision = Decision(options.plan)
        self.entries: list[Specialization] = []
        self._hits = self.traces = self._evictions = 0
        self.listed = ListedPrograms(self.context)
        self.tables = TablesOfModel(is_active=self.context.rebound.is_active)
        self.context.warnings.check_options(options)

    def __bool__(self) -> bool:
        return bool(self.entries)

    @property
    def latest(self) -> Specialization:
        """The specialization used last. Raises InputError if nothing is compiled yet."""
        if not self.entries:
            hint = "compile(..., example_args=(x,)), or call it once"
            raise InputError("the pipeline is not compiled yet", why="no inputs have been seen", hint=hint)
        return self.entries[-1]

    def clear(self) -> None:
        """Drop all specializations. The next call records the model again and keeps the plan."""
        self.entries.clear()
        self.listed.clear()
        self.context.homes.clear()

    def reschedule(self, options: Options) -> None:
        """Take other options for all specializations. Their programs are lowered anew.

        Raises InputError for `n_microbatches="auto"`, which is chosen together with the cut.
        """
        if options.n_microbatches == "auto" and self.decision.plan is not None:
            hint = "a number; or compile anew, which cuts anew as well"
            raise InputError('n_microbatches="auto" is chosen with the cut, which stays', hint=hint)
        self.options = options
        self.context.warnings.undivided(options)
        self.listed.clear()
        for specialization in self.entries:
            specialization.reschedule(options)

    def find(self, inputs: FlatInputs) -> tuple[Specialization, MiniBatch]:
        """Return the specialization for these inputs, compiled now if there is none, and the inputs in micro-batches."""
        check_untransformed(inputs.leaves, self.model.parameters)
        traces, warnings = self.traces, self.context.warnings
        if self.options.n_microbatches not in warnings.counted:
            warnings.fewer(inputs.samples, self.options.n_microbatches)
        if self.decision.plan is None and self.options.has_open_choice:
            self._compile_open(inputs)
        batch = MiniBatch(inputs, split_sizes(inputs, self.options.default_microbatches))
        if inputs.lists:
            warnings.unequal(sum(batch.sizes), self.options.default_microbatches, len(batch.sizes))
        signature = signature_of(self.model, batch)
        specialization = self._lookup(signature, batch.sizes)
        if specialization is None:
            specialization, batch = self._settle(batch, signature)
        if specialization.single_value_norm and (enough := of_two_samples(batch, self.options)) is not batch:
            warnings.single(batch.sizes, enough.sizes, specialization.single_value_norm)
            batch = enough
            specialization = self._lookup(signature, batch.sizes) or self._compile(batch, signature)
        self._hits += traces == self.traces
        if len(batch.sizes) > 1 and not specialization.is_divided:
            check_division(specialization.graph, self.options, self.context)
            specialization.is_divided = True
        self._note_use(specialization)
        return specialization, batch

    def find_each(self, listed: MicrobatchList) -> tuple[Specialization, ...]:
        """Return the specialization of each micro-batch of a list, compiled now if there is none."""
        check_untransformed([leaf for call in listed.calls for leaf in call.leaves], self.model.parameters)
        traces = self.traces
        if self.decision.plan is None:
            batch = ListedBatch(listed.largest_first())
            self._add(CompileRequest(batch, (batch,), signatures_of(self.model, batch.calls[:1])[0]))
        kinds = [*zip(signatures_of(self.model, listed.calls), listed.sizes, strict=True)]
        found: list[tuple[tuple[Signature, int], Specialization]] = []
        for kind, call in zip(kinds, listed.calls, strict=True):
            if all(known != kind for known, _ in found):
                batch = ListedBatch((call, *listed.calls[1:]))
                found.append((kind, self._lookup(kind[0], kind[1:]) or self._compile(batch, kind[0])))
        for _, one in found if len(listed.calls) > 1 else ():
            if carried := one.facts.carried:
                carried.check_microbatches()
        self._hits += traces == self.traces
        for one in {id(one): one for _, one in found}.values():
            self._note_use(one)
        return tuple(next(one for known, one in found if known == kind) for kind in kinds)

    def find_listed(self, listed: MicrobatchList) -> tuple[Specialization, ...]:
        """Return the specialization of each micro-batch of a list that is about to run. Later ones find the tables that earlier ones leave."""
        found = self.find_each(listed)
        if len({one.number for one in found}) > 1:
            for place, samples in enumerate(listed.sizes):
                if self.tables.leave(found[place], self.entries, samples):
                    found = self.find_each(listed)
            self.tables.warn_of_growth(found, self.entries)
        return found

    def _note_use(self, specialization: Specialization) -> None:
        """Count a mini-batch, and make the specialization the last used; one that was dropped meanwhile serves this once."""
        self.context.backend.used(specialization.number)
        if specialization.note_call() and self.context.backend.holds_model:  # ranks would have to agree on new programs
            specialization.drop_programs()
            self.listed.clear()
        self.entries.sort(key=lambda one: one is specialization)

    def for_call(self, specialization: Specialization, batch: MiniBatch) -> Specialization:
        """Return the specialization that runs a call, with the merge rules of its outputs if there are several micro-batches.

        Raises InputError if an output cannot be put together.
        """
        if len(batch.sizes) == 1:
            return specialization
        if specialization.merging is None:
            specialization.merging = merging_specialization(specialization, batch, self.options, self.context)
        check_whole_size(specialization.merging, sum(batch.sizes), self.context)
        return specialization.merging

    def check_values(self) -> None:
        """Raise InputError while tensors that were on meta have no values."""
        meta_init = self.context.meta_init
        if not meta_init.is_done and meta_init.check():
            self._values_ready(self.latest)

    def check(
        self, specialization: Specialization, batch: MiniBatch, arrivals: Mapping[tuple[str, bool], Any] | None = None
    ) -> None:
        """Compare a recording with the model itself, if that is due. Raise MismatchError. `arrivals` are those of a step."""
        if specialization.calls >= specialization.check_at[torch.is_grad_enabled()]:
            with unwatched(), self.context.backend.without_collectives(self.model, self.options):
                self.checks.run(specialization, batch, arrivals)
        if specialization.facts.tables:
            latest = self.entries[-1]
            owner = latest if latest.merging is specialization else specialization
            self.tables.leave(owner, self.entries, batch.sizes[0])

    def explain(self) -> Recordings:
        """Return a row per specialization, the last used first, and how often they served."""
        kept = tuple(specialization.report() for specialization in reversed(self.entries))
        return Recordings(kept, self.options.cache_size, self._hits, self.traces, self._evictions)

    # -- compiling --------------------------------------------------------------------------------------------------

    def _compile_open(self, inputs: FlatInputs) -> None:
        """Compile the first specialization, with the number of micro-batches and the schedule of the shortest step."""
        candidates = candidate_batches(inputs, self.options)
        batch = first_batch(candidates, self.options)
        self._add(CompileRequest(batch, candidates, signature_of(self.model, batch)))

    def _settle(self, batch: MiniBatch, signature: Signature) -> tuple[Specialization, MiniBatch]:
        """Return a specialization for a call that none serves yet, and the micro-batches that it serves.

        If the model branches between the two sizes of micro-batches, the samples go into fewer micro-batches.
        """
        largest = self._lookup(signature, batch.sizes[:1]) or self._compile(batch, signature)
        guard = largest.broken_guard(batch.sizes)
        if guard is None:
            return largest, batch

        def find(sizes: tuple[int, ...]) -> Specialization | None:
            return self._lookup(signature, sizes)

        specialization, batch = on_one_side(batch, guard, self.options, self.context.warnings, find)
        return specialization or self._compile(batch, signature), batch

    def _lookup(self, signature: Signature, sizes: tuple[int, ...]) -> Specialization | None:
        """Return the newest specialization that serves these micro-batches on all ranks, which look it up together."""
        serving = (entry for entry in reversed(self.entries) if entry.accepts(signature, sizes))
        found = next(serving, None)
        number = self.context.backend.in_common(
            found.number if found else 0, lambda: {entry.number for entry in (*filter(None, [found]), *serving)}
        )
        return next((entry for entry in self.entries if entry.number == number), None)

    def _compile(self, batch: MiniBatch, signature: Signature) -> Specialization:
        alike = [entry for entry in self.entries if entry.is_of(signature)]
        guard = alike[-1].broken_guard(batch.sizes[:1]) if alike else None
        self.context.warnings.anew(signature, guard, batch.sizes[0], self.options.cache_size)
        changes = alike[-1].state_changes() if alike else ()
        changing, lifted = self.context.changing, NOTHING_LIFTED
        if changes or changing.counts:
            changing.note(changes, self.options)
            lifted = changing.lifted(entry.guards for entry in self.entries if entry.guards)
        before = self._drop_replaced()
        if batch.sizes[0] == 1 and has_batch_norm(self.model):
            batch = of_two_samples(batch, self.options)  # costs are measured on the first micro-batch
        try:
            specialization = self._add(CompileRequest(batch, (batch,), signature, lifted, changes))
        except PlanError:  # of ranks that disagree: the next call compares the model with the same recording
            self.entries = before
            changing.forget(changes)
            raise
        specialization.changes, specialization.is_divided = changes, len(batch.sizes) > 1 and not batch.is_listed
        if self.tables.take_off_replaced(specialization, self.entries):
            self.entries.remove(specialization)
            return self._lookup(signature, batch.sizes) or self._compile(batch, signature)
        return specialization

    def _drop_replaced(self) -> list[Specialization]:
        """Drop specializations that can never serve again: their parameters are not the model's any more. Return all there were."""
        present, before = {id(parameter) for parameter in self.model.parameters()}, self.entries
        self.entries = [entry for entry in before if all(id(own) in present for own in entry.parameters)]
        self.context.homes.keep(self.model)
        return before

    def _add(self, request: CompileRequest) -> Specialization:
        """Compile for a request and keep the result. The least recently used specialization goes if there are too many."""
        whole = request.batch.whole
        is_cut = len(request.batch.sizes) > 1 and not request.batch.is_listed
        if is_cut:
            warn_of_inputs(whole, self.model)
        if is_cut and not all(tensor.is_floating_point() for tensor in whole.tensors):
            self.context.warnings.offsets(offset_names(whole.names, whole.leaves, whole.dims, whole.samples))
        with unwatched(), random_states_restored(sources_beside(whole.leaves)):  # an import may draw
            specialization, decision = specialize(request, self.options, self.decision, self.context)
        if self.decision.plan is None:
            self.options = self.options.with_choice_of(specialization.plan)
        self.decision = decision
        if not self.entries and self.context.meta_init.is_done:
            self._values_ready(specialization)
        self.traces = specialization.number = self.traces + 1
        self.checks.register(specialization)
        self.entries.append(specialization)
        if len(self.entries) > self.options.cache_size:
            self._evictions += 1
            self.listed.clear()
            self.context.warnings.evicted(self.entries.pop(0).signature)
        return specialization

    def _values_ready(self, specialization: Specialization) -> None:
        self.context.backend.values_ready(specialization.graph, specialization.stages, self.context.homes)
