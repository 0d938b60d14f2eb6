"""Kernels for processors: quantized products by Numba, with a torch reference beside each.

Knows arrays and torch tensors, nothing of pdlab. `target` says which bodies run here, `weights`
packs, `linear` multiplies, `team` shares the work among threads; `reference` is the same in torch.
"""
