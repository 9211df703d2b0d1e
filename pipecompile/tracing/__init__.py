"""From a model as its author wrote it to a `torch.fx.GraphModule` whose batch size is free."""

from pipecompile.tracing.recording import trace

__all__ = ["trace"]
