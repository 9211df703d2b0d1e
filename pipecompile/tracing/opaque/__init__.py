"""Opaque calls: a part of the model that cannot be recorded becomes one node, which runs the user's own code.

    1  retries          a recording fails: make the smallest piece around the failure opaque, and record again
       attempts         choose that piece
       hooked_layers    layers with backward hooks that run user code are opaque from the first recording on
    2  trial_runs       run the real model on real inputs; note what each call of the piece returns, reads and costs
       trial_calls      the notes of a call
       function_calls   find the calls to note when the piece is a call of one torch function
    3  result_spec      infer from several trial runs what a call returns in any run: per tensor, dtype and sizes
       unread_parts     what the results of several runs have in common, and containers that differ, which nothing may read
    4  fake_results     make fake tensors of a result spec, with which the recording goes on
    5  opaque_calls     match the n-th call of a piece while recording with its result spec; describe the node
    6  opaque_module    the module that the node calls: run the piece, and check its result in every run

Open `retries` first. `tracing.model_pieces` defines a piece: a submodule, a method, or a line that calls a torch function.
The check in `opaque_module` is the verifier: it raises TraceError PC112 when a result breaks its spec.
"""
