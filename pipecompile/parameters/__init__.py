"""Tensors of the model: where parameters and buffers live, and where their values come from.

    meta ── uninitialized ──► memory ── meta_init, checkpoint_files ──► values
                                 │
                             placement ──► device of the first stage that uses the tensor (its home)
                                 └───────► tied_mirrors: copies on the devices of further stages

Open `placement.py` first. `optimizer_state.py` names the state of an optimizer by parameters. Tensors stay the
objects that the user's optimizers refer to.
"""
