"""The command line, `demask`: every command is a thin wrapper over the functions of the package."""

from demask.cli.main import app, main

__all__ = ["app", "main"]
