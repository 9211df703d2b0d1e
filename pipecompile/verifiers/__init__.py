"""Verifiers: one per level, each reports all faults at once in one VerifyError.

    traced graph   traced_graph.py; recording.py compares it with the model on real values
    plan           plan.py, and routes.py for its routes
    schedule       schedule.py, with deadlock.py and schedule_picture.py
    program        program.py, by levels of the lowering: operands.py, pairing.py, tied_parameters.py, lifetimes.py
    bounds         memory_bounds.py: micro-batches in flight, bytes

Verifiers share no code with the passes that they check. Open `program.py` first: it lists what each level promises.
"""

from __future__ import annotations

from pipecompile.verifiers.message_models import ALL_MODELS, MessageModel
from pipecompile.verifiers.program import Level
from pipecompile.verifiers.verification import verify, verify_program

__all__ = ["ALL_MODELS", "Level", "MessageModel", "verify", "verify_program"]
