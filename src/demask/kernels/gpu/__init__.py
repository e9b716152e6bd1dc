"""GPU kernels in Triton, one file per family. They are imported when a tensor on a GPU is
multiplied for the first time; `sparse.products.gpu_products` launches them.

They need Triton 3.6 or newer and also run in its interpreter: loops with bounds known at run time
are `while` loops, and functions that the interpreter lacks are not called.
"""
