"""cuda_graphs: stages captured as CUDA graphs once, and replayed instead of launched kernel by kernel.

`step_graphs` decides whether a whole step is one graph: `step_code` is the code that it is captured from, `captured_step` the
graphs, with `static_arrivals` and `step_gradients` as their memory. Else `stage_graphs` decides per stage, slot and kind of inputs
whether a graph may be used; `replay` is a captured stage as one operation of autograd; `weight_gradients` has the sums that its
backward adds to; `capture` is CUDA's capturing, which the tests emulate on a CPU. Open `stage_graphs.py` first.
"""
