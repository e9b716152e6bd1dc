"""Thin callbacks that let training engines prune; each needs its engine, an extra."""
