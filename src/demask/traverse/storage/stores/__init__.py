"""Formats of files that streams read and write, each in one file of this folder."""
