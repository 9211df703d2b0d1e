"""What a model computes on while it is recorded: twins of tensors, sizes as symbols."""
