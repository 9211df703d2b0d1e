"""Agreements of ranks: what they compare before a call, so that none runs another step than the others. Open `lockstep.py` first.

compile_settings, graph_identity    before the first step        lockstep, collective_call    before every call
weight_updates, state_of_copies     what scripts did between the calls
"""
