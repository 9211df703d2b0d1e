"""One pipeline on the ranks of `torch.distributed`: the same programs, each rank running the row of its device."""
