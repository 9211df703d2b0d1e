"""Copies of a pipeline: sums of their gradients, shards of their parameters, and the work of the others after a copy is lost.

Open `replicas.py` first.
"""
