"""Recording: from a model as its author wrote it to a TracedGraph, a `torch.fx.GraphModule` with a symbolic batch size.

`recording` runs the model, `call_recorder` records its calls. The level is `traced_graph.TracedGraph`, with `graph_facts` and
`node_facts`; its text form is `graph_text`, the parser `graph_parser`, the verifier `verifiers/traced_graph.py`. `fakes/` makes
the fake tensors, `interception/` the patches, `emit/` the nodes, `state/` restores the model, and `opaque/` handles pieces that
cannot be recorded. Open `recording.py` first.
"""

from pipecompile.tracing.recording import trace

__all__ = ["trace"]
