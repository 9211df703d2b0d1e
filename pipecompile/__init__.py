"""Schedule compiler and graph partitioner for PyTorch."""
