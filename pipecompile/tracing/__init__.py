"""From a model as its author wrote it to a `torch.fx.GraphModule` whose batch size is free."""

from pipecompile.tracing.recorder import trace

__all__ = ["trace"]
