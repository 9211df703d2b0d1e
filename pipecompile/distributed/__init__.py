"""One pipeline on the ranks of `torch.distributed`: the same programs as in one process, each rank running the row of its device.

`rank_pipeline` is the Pipeline that users call, `rank_executable` the row of one rank bound to its communicator. Between ranks,
`communicator` sends values through `mailboxes` and keeps the `status_board`. `data_parallel` and `sharded_parameters` reduce the
gradients of several replicas of a pipeline.

Text form: `str(protocol.PROTOCOL)`, the tables of messages, tags, credit and store keys. Programs are verified before they run, by
`verifiers`; ranks compare the text of their programs. Open `rank_pipeline.py` first.
"""
