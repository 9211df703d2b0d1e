"""Interception: the recorder's view of calls that torch does not show to a TorchFunctionMode.

    module_calls       modules, autograd functions, TorchScript, random states, grad mode: patched where they are defined
    checkpoint_calls   regions of torch.utils.checkpoint: their nodes are noted as such
    python_builtins    len, isinstance, max, text and hash of sizes: patched; which texts are only messages
    user_functions     calls of int, float and type redirected in their bytecode; their caches bypassed, and purged at the end
    dispatcher         operators that only the dispatcher sees
    assertions         branches on values that only raise: recorded as checks
    randomness         draws of random numbers by torch and by Python, functions that set the random state
    transformer_masks  masks whose values nn.Transformer reads

Open `module_calls` first. Everything is undone when the recording ends.
"""
