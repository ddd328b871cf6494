"""Benchmarks of speed and memory on a GPU, beside other implementations if they are installed. Not run by tests."""
