"""The plugin of `pytest -p tests.helpers.narrow_vectors`: CPU kernels use the instructions of an x86-64 processor
without AVX, vectors of 128 bits without masks."""

from __future__ import annotations

import llvmlite.binding as llvm

CPU = "x86-64-v2"

llvm.get_host_cpu_name = lambda: CPU
llvm.get_host_cpu_features = llvm.FeatureMap
