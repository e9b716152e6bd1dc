"""Marks of tests that older releases of torch fail, for reasons of their own."""

from __future__ import annotations

import pytest
import torch

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))


def since(major: int, minor: int, reason: str) -> pytest.MarkDecorator:
    """Skip with torch before a release. reason: what that torch lacks."""
    text = f"torch before {major}.{minor}: {reason}"
    return pytest.mark.skipif((major, minor) > RELEASE, reason=text)
