"""The per-stage table, as it is printed into a file."""

from __future__ import annotations

from dataclasses import replace

from pipecompile.ir.candidates import Candidate, Considered
from pipecompile.ir.timeline import Span, Timeline
from pipecompile.show.table import StageTable, considered_table, render

GOLDEN = """\
4 stages on 4 devices, cut by ilp, profile costs, per micro-batch

                                                 params   fwd   bwd  saved  sent   skips
 stage  device  modules                   nodes       M    ms    ms    MiB   MiB  in/out
 ───────────────────────────────────────────────────────────────────────────────────────
     0  cuda:0  conv1 … layer1.1              5     1.4  12.1  24.3    310  12.3     0/1
     1  cuda:1  layer2.0 … layer2.1           3     5.0  12.0  25.0    210   6.1     0/0
     2  cuda:2  layer3.0.conv1                3     8.0  11.9  23.0    150   3.1     0/0
     3  cuda:3  layer4.0.conv1 … flatten      4    11.0   9.0  20.0     50   0.0     1/0

                                             15    25.4  45.0  92.3    720  21.5

bottleneck 37.0 ms, feasible · lower bound 36.0 ms · gap 2.7% · balance 93% · bubble 27.3%"""


def test_the_table_of_a_plan(plan):
    drawn = render(
        StageTable(plan, Timeline(1, (Span(0, "compute", "0F0", 0.0, 0.727), Span(0, "to 1", "v", 0.727, 1.0))))
    )
    assert drawn == GOLDEN, f"got\n{drawn}"


def test_no_control_codes_and_never_wider_than_asked(plan):
    """Names are broken behind dots, and no column is lost."""
    deep = "backbone.features.denseblock3.denselayer24.norm1"
    first = replace(plan.stages[0], first=deep, last=deep.replace("norm1", "conv2"), flops=1.2345e12, memory=2.0**40)
    stages = (first, *plan.stages[1:])
    for width in (80, 100, 120):
        drawn = render(StageTable(replace(plan, stages=stages), None), width)
        assert "\x1b" not in drawn
        assert max(map(len, drawn.splitlines())) <= width
        assert "denselayer24." in drawn
        assert "in/out" in drawn


def test_flops_have_a_column_where_they_are_known(plan):
    stages = tuple(replace(stage, flops=1.5e9 * (stage.stage + 1)) for stage in plan.stages)
    lines = render(StageTable(replace(plan, stages=stages), None)).splitlines()
    assert lines[2].split()[:3] == ["params", "FLOPs", "fwd"]
    assert lines[3].split()[4:6] == ["M", "G"]
    assert [line.split()[-6] for line in lines[5:9]] == ["1.50", "3.00", "4.50", "6.00"]
    assert "15.0" in lines[10]
    assert "FLOPs" not in render(StageTable(plan, None))


def test_long_ends_stand_on_lines_of_their_own(plan):
    deep = "features.denseblock3.layer24.norm1"
    stages = (replace(plan.stages[0], first=deep, last=deep.replace("norm1", "conv2")), *plan.stages[1:])
    lines = [line.split("  ") for line in render(StageTable(replace(plan, stages=stages), None)).splitlines()]
    cells = [cell.strip() for line in lines for cell in line]
    assert "features.denseblock3.layer24.norm1" in cells
    assert "…features.denseblock3.layer24.conv2" in cells


def test_a_stage_of_one_module_names_it_once_and_the_model_itself_is_the_root(plan):
    stage = replace(plan.stages[0], first="", last="", parameters=128, forward=3.1e-6, backward=0.0)
    drawn = render(StageTable(replace(plan, n_stages=1, placement=(0,), stages=(stage,)), None))
    assert "1 stage on 1 device" in drawn
    assert drawn.count("(root)") == 1
    assert "3.10" in drawn
    assert "µs" in drawn
    assert "bubble" not in drawn


def test_brackets_in_names_are_not_markup(plan):
    stages = (replace(plan.stages[0], first="blocks[bold]", last="blocks[/bold]"), *plan.stages[1:])
    assert "blocks[bold] … blocks[/bold]" in render(StageTable(replace(plan, stages=stages), None))


CONSIDERED = Considered(
    (
        Candidate(2, "1f1b", (True, False), 1e-3, 4e-3, (2.0**21,)),
        Candidate(4, "[b]gpipe", (True, True), 2e-3, 0.01, (3 * 2.0**20,)),
        Candidate(8, left_out="stage 1 needs 9 GiB"),
    ),
    chosen=0,
)


def test_the_cells_are_those_of_the_plain_table() -> None:
    plain, table = str(CONSIDERED).split("\n"), render(considered_table(CONSIDERED)).split("\n")
    assert table[0] == plain[0]
    assert [line.split() for line in table[5:]] == [line.split() for line in plain[4:]]


def test_the_chosen_candidate_is_bold_and_others_left_out_are_dim() -> None:
    assert [row.style for row in considered_table(CONSIDERED).rows] == ["bold", "", "dim"]
