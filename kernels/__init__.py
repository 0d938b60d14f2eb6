"""Kernels for GPUs and processors; imported as `pdlab_kernels`."""
