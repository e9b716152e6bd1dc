"""Rewrites: programs changed into others that compute the same.

A rewrite is one entry: a `Rule` for calls of some ops, or a `Pass` over a program, each with cases.
A `Phase` is a tuple of entries, which `rewrite` applies in order. Laws are tested for every entry,
and a trace tells what each of them changed.
"""
