"""Cases with programs and passes of the user, on four ranks."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import pipecompile as pc
from pipecompile.ir import Kind, Op, Program
from pipecompile.passes import lower
from pipecompile.passes.split_backward import split_backward
from tests.distributed.case_models import mean_square, unet
from tests.support.eager import looped, off

COUNT = 3


def frees_last(program: Program) -> Program:
    """Free nothing before the end of a row."""
    rows = tuple(tuple(sorted(row, key=lambda instruction: instruction.op is Op.FREE)) for row in program.rows)
    return replace(program, rows=rows)


def broken(program: Program) -> Program:
    """Free nothing."""
    rows = tuple(tuple(one for one in row if one.op is not Op.FREE) for row in program.rows)
    return replace(program, rows=rows)


def own_order() -> dict[str, Any]:
    """Run a program of the user, then passes, and compare this rank's gradients with eager; return the errors of faulty passes."""
    torch.manual_seed(11)
    model, inputs = unet()
    eager = looped(copy.deepcopy(model), inputs, COUNT, mean_square)
    options: dict[str, Any] = {
        "n_microbatches": COUNT,
        "loss_fn": mean_square,
        "batch_norm": "each",
        "cost": "analytic",
    }
    first = pc.compile(copy.deepcopy(model), 4, example_kwargs=inputs, **options)
    first.step(**inputs)
    program = lower(pc.build_schedule("zb-h1", 4, COUNT), first.program.routes, receive_ahead=1)
    passes = [pc.UserPass(split_backward, before="compute"), pc.UserPass(frees_last, before="slots")]
    results: dict[str, Any] = {}
    owns: dict[str, dict[str, Any]] = {
        "program": {"schedule": program},
        "passes": {"passes": passes},
        "offload": {"offload": True},
    }
    for name, own in owns.items():
        pipe = pc.compile(copy.deepcopy(model), 4, example_kwargs=inputs, plan=first.plan, **options, **own)
        pipe.step(**inputs)
        gradients = {f"{n}.grad": p.grad for n, p in pipe.named_parameters() if p.grad is not None}
        results[name] = off(gradients, {n: eager[n] for n in gradients})
        results["is_own"] = results.get("is_own", True) and pipe.program == (
            program if name == "program" else pipe.program
        )
        results["is_own"] = results["is_own"] and pipe.program != first.program
    kinds = {
        instruction.action.kind for row in pipe.program.rows for instruction in row if instruction.action is not None
    }
    results["offloads"] = {Kind.OFFLOAD, Kind.RELOAD} <= kinds
    results["broken"] = _refusal(model, inputs, first.plan, passes=[pc.UserPass(broken)], **options)
    others = [pc.UserPass(frees_last, before="slots")] if dist.get_rank() == 2 else []
    return results | {"differing": _refusal(model, inputs, first.plan, passes=others, **options)}


def _refusal(model: torch.nn.Module, inputs: dict[str, torch.Tensor], plan: pc.Plan, **options: Any) -> str:
    try:
        pc.compile(copy.deepcopy(model), 4, plan=plan, **options).step(**inputs)
    except pc.PipecompileError as error:
        return str(error)
    return ""


CASES = {"own order": own_order}
