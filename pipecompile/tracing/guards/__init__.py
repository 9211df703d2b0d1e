"""Guards: the state that a recording read beyond its arguments, and the check that it has not changed.

    1  attribute_reads     note, while the model runs on fake tensors, which attributes of which objects Python reads
    2  read_state          the state that a recording depends on, as data: values by label, and rows that fetch them again
    3  state_reader        walk from the model along what was read to every value: containers, functions, globals, classes
       object_state        the attributes of one object on this walk
       container_state     the items of one container on this walk
    4  state_fetch         whether the state is unchanged, and the metadata of its tensors, in a few expressions that run in C
    5  strict_equality     whether a value that was replaced is the same to a recording
    6  state_guards        the guards of one recording: whether they hold, and if not, what has changed, and where it is read
    7  lifted_state        numbers that change between steps: stand-ins while recording, the present numbers before every run

The contents of tensors are not guards, because the graph reads them at every run. Open `state_guards` first.
"""
