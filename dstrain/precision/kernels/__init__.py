"""Triton kernels for FP8 training. Each has a plain PyTorch definition of the same signature: its specification."""
