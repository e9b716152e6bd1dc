"""Random masked networks, the laws each of them must pass, and a minimiser for those that fail."""
