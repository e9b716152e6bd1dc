"""Kernels for GPUs, in Triton: one file per family. Nothing here is imported before a tensor on a
GPU is multiplied; `sparse.gpu` launches them.

They are written for Triton 3.6 and newer and run in its interpreter too: loops whose bounds are
known at run time are `while` loops, and nothing is called that the interpreter lacks.
"""
