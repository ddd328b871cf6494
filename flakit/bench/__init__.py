"""Benchmarks of the operators' speed and memory on a GPU, beside other implementations if they are installed."""
