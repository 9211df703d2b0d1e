"""Copies of a pipeline: sums of their gradients, shards of their parameters, and how they go on without one that is lost.

Open `replicas.py` first.
"""
