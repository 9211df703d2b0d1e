"""Fakes: the values on which a model computes while it is recorded. Tensors have no memory, and sizes are symbols.

    fake_tensors    the fake twins of parameters, constants and inputs, and tensors made of unknown numbers
    batch_symbol    the batch size as a symbol, guards on it, and nodes that compute sizes
    shared_results  results of operators on fakes, which later recordings use again
    data_sizes      symbols for sizes that the data decide, such as the number of rows that a mask selects
    lifted_numbers  stand-ins for numbers that change between steps, with arithmetic that becomes nodes
    lifted_calls    calls of torch with such numbers: they may enter values, and no shape
    kernel_dtypes   dtypes that fakes accept and kernels refuse

Open `batch_symbol` first.
"""
