"""cells: the computation of one stage on one micro-batch, as functions of the frame.

`stage_cells` says what a stage computes, `stage_call` calls its layers fast. `forward_backward` has F and B, `divided_backward` I
and W, `recompute` R, `saved_state` what R saves of the state. `deferred_batchnorm` and `torch_compiled` change the stages before.
Open `forward_backward.py` first.
"""
