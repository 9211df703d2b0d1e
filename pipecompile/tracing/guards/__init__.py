"""Guards: what a recording read beyond its arguments, and whether all of it is still the same.

    1  attribute_reads     note, while the model runs on fake tensors, which attributes of which objects Python reads
    2  code_names          the globals and attributes that the code of a function names
    3  read_state          follow the reads from the model to every value behind them: the state that the recording depends on
    4  state_watch         the state as parallel lists, which one expression in C compares with the present
    5  strict_equality     whether a value that was replaced is the same to a recording
       tensor_metadata     what a recording depends on in a tensor that it owns: shape, dtype, device, requires_grad
    6  state_guards        the guards of one recording: do they hold, and if not, what has changed, and where it is read

The contents of tensors are no guards, because the graph reads them at every run. Open `state_guards` first.
"""
