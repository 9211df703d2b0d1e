"""State: the contents of a model, restored after a recording, and the changes by a call, recorded as nodes.

    snapshot              containers, attributes and random states: found, compared, restored
    signal_errors         errors of signal handlers in calls whose errors are dropped
    hidden_containers     slots, arrays and tuples as containers
    tensor_contents       contents of tensors, restored after a run of the real model
    function_state        the same for what a loss function reaches
    process_settings      settings of the process, such as the default dtype
    change_log            what user code changes in the forwards of a step, undone while one of them is recomputed
    preserved_run         the same for runs of nodes, by the cost models and the initialization from meta

    leftover_state        differences that a call leaves; effect nodes
    call_comparison       whether two calls are recorded alike
    returned_values       what a call returns, as a node that takes part in that comparison
    recording_leftovers   those differences for one recording, without what leaf modules do themselves; whether a module
                          still is what it was when the recording began
    hook_leftovers        what hooks of layers leave and the forward takes away: such layers are recorded through
    carried_state         what a call reads before it replaces it: written in place, or left for another recording
    second_call           the decision: effect nodes, or PC114 because the model reads what the previous call left

Open `second_call` first, then `snapshot`.
"""
