"""Triton kernels of the CUDA path, each beside the plain-torch function that says what it computes."""
