"""Kernels for processors, by Numba, with a torch reference beside each.

Knows arrays and torch tensors, nothing of pdlab. `target` says which bodies run here.

    simd, chunks, team      what kernels are written in, and who runs them
    weights, linear         packed weights, and products with them
    attention               paged K and V in every format, read and written in place
    survey                  the most probable tokens
    step, decoder           a whole decoder step as one compiled call
    reference, attention_reference   the same in torch
"""
