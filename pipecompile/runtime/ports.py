"""The registers of one compute instruction, by the names of its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipecompile.ir import HOST, Instruction, Operand

__all__ = ["Ports"]


class Ports:
    """`reads` and `writes` are those of activations and of what stages save; gradients are asked for by cell."""

    def __init__(self, instruction: Instruction, register: Callable[[Operand], int]) -> None:
        self.arriving = [(operand.value, register(operand)) for operand in instruction.reads]
        self.leaving = [(operand.value, register(operand)) for operand in instruction.writes]
        self.reads = {value.name: index for value, index in self.arriving if value.consumer is None}
        self.writes = {value.name: index for value, index in self.leaving if value.consumer is None}

    def gradients(self, outputs: Sequence[str]) -> list[tuple[int, list[int]]]:
        """Which output, and the registers of its gradients, the last consumer's first; the host comes after all stages."""
        found: dict[str, list[tuple[float, int]]] = {}
        for value, index in self.arriving:
            if value.consumer is not None:
                rank = float("inf") if value.consumer == HOST else float(value.consumer)
                found.setdefault(value.name, []).append((rank, index))
        return [
            (outputs.index(name), [index for _, index in sorted(ranked, reverse=True)])
            for name, ranked in found.items()
        ]

    def sent(self, inputs: Sequence[str]) -> list[tuple[int, int]]:
        """Registers of the gradients that are sent, and of which input."""
        return [(index, inputs.index(v.name)) for v, index in self.leaving if v.consumer is not None]
