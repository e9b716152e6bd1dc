"""Private APIs of torch, by topic: no other part of the package names one.

What runs per call or per node is torch's own class or function under a plain name, not a wrapper.
"""
