"""cells: the computation of one stage on one micro-batch, as functions of the frame.

`stage_cells` describes the computation of a stage, `stage_call` calls its layers fast. `forward_backward` has F and B, `divided_backward`
I and W, `recompute` R, `saved_state` the state that R needs. `deferred_batchnorm` and `torch_compiled` rewrite the stages first.
Open `forward_backward.py` first.
"""
