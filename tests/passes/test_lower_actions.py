from __future__ import annotations

from pathlib import Path

from golden import CheckGolden

from pipecompile.ir import Schedule
from pipecompile.ir.program_text import parse_route
from pipecompile.passes.lower_actions import lower_actions

GOLDEN = Path(__file__).parent / "golden" / "compute.txt"


def test_actions_read_and_write_what_the_routes_say(check_golden: CheckGolden) -> None:
    def run(text: str) -> str:
        lines = text.splitlines(keepends=True)
        routes = [parse_route(line.strip()) for line in lines if line.startswith("route ")]
        schedule = Schedule.from_csv("".join(line for line in lines if not line.startswith("route ")))
        return str(lower_actions(schedule, routes))

    check_golden(GOLDEN, run)
