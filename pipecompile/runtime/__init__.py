"""Running a program: one interpreter per device, dispatched inline or in threads, on CPU and CUDA alike."""
