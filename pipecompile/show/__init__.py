"""How plans, schedules and timelines look: a table, a text grid, a Gantt chart, a Perfetto trace, a Graphviz graph.

Nothing here is imported by the levels below, and matplotlib only when a picture is drawn.
"""

from __future__ import annotations

from pipecompile.show.dump import dump, write_text
from pipecompile.show.gantt import timeline_svg
from pipecompile.show.graphviz import graph_dot
from pipecompile.show.grid import timeline_grid
from pipecompile.show.html_report import report_html
from pipecompile.show.notebook import pipeline_html
from pipecompile.show.perfetto import timeline_trace
from pipecompile.show.table import render, stage_table

__all__ = [
    "dump",
    "graph_dot",
    "pipeline_html",
    "render",
    "report_html",
    "stage_table",
    "timeline_grid",
    "timeline_svg",
    "timeline_trace",
    "write_text",
]
