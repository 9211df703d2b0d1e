"""Layouts: what a cluster would take for a step of a model, before anything is bought; open estimate.py first.

hardware        a cluster: nodes, devices, memory, links
enumeration     pipeline x data parallel x sharded layouts of its devices
ring_seconds    seconds of the collectives of a layout
memory_kinds    bytes of a device by kind
pipeline_step   cut, schedule and simulation of one layout
layout_table    the rows as data, and their table
"""
