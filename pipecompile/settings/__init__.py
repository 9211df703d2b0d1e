"""The keywords of `compile` in four groups, each with the checks of its values.

    batch     how a mini-batch is divided, and its loss        machine   devices, memory, links, and seconds of nodes
    cut       stages, solver, and constraints on the cut       run       schedule, recomputation, dispatch, caches

A group is a frozen dataclass; a field's annotation names the check of its value (group.py, value_checks.py). `Options` in
pipecompile/options.py joins the groups and checks what spans several; open it first.
"""
