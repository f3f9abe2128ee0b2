"""CUDA sources to running kernels: compiled by NVRTC, kept by content, launched by the driver.

Knows files, compilers and drivers; must not know models, plans or torch. Neither a CUDA toolkit nor
a host compiler is needed, and nothing of CUDA is imported before it is used.
"""
