"""The table of layouts: its lines, its order, and the forms for a terminal and a notebook."""

from __future__ import annotations

from typing import Any

import pipecompile as pc
from pipecompile.layouts.enumeration import Layout
from pipecompile.layouts.layout_table import ClusterPlan, LayoutRow, StepSeconds
from pipecompile.layouts.memory_kinds import DeviceBytes


def row(**values: Any) -> LayoutRow:
    usual = {
        "layout": Layout(4, 2), "n_stages": 4, "schedule": "1f1b", "n_microbatches": 8, "samples": 2, "recompute": (False,) * 4,
        "seconds": StepSeconds(0.1, 1.0, 0.2, 0.05), "lower_bound": 1.1, "memory": DeviceBytes(2.0**30, 2.0**30, 2.0**31, 2.0**30),
        "missing": 0.0, "optimizer": "adamw",
    }  # fmt: skip
    return LayoutRow(**(usual | values))


def test_the_line_is_the_call_of_compile() -> None:
    assert row().line == (
        'pc.compile(model, 4, example_args=(x,), loss_fn=loss_fn, mesh=init_device_mesh("cuda", (4, 2), mesh_dim_names=("pp", "dp")), n_microbatches=8, '
        'schedule="1f1b", optimizer="adamw")'
    )
    alone = row(layout=Layout(4), recompute=(True, True, True, False), optimizer=None).line
    assert '(4,), mesh_dim_names=("pp",))' in alone
    assert "checkpoint=[True] * 3 + [False] * 1)" in alone
    assert 'checkpoint="always"' in row(recompute=(True,) * 4).line


def test_the_table_has_the_rows_that_fit_with_their_lines_and_what_the_others_lack() -> None:
    plan = ClusterPlan("Model", pc.Cluster.of("8xh100"), 16, (row(), row(layout=Layout(8), missing=2.0**30)))
    text = str(plan)
    assert "2 layouts, 1 fits" in text
    assert "1.35" in text
    assert "1.00 GiB" in text
    assert text.count("pc.compile(") == 1
    assert "lacks" in text
    assert "recomputed" not in text
    assert plan.best is plan.rows[0]
    assert "best=LayoutRow" in repr(plan)
    html = plan._repr_html_()
    assert html.count("<tr>") == 3
    assert "pc.compile" in html


def test_nothing_that_fits_is_no_best() -> None:
    plan = ClusterPlan("Model", pc.Cluster.of("8xh100"), 16, (row(missing=1.0),))
    assert plan.best is None
    assert "0 fit" in str(plan)
    assert "pc.compile" not in plan._repr_html_()
