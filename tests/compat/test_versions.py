"""A newer torch than demask was tried with: one warning, when demask is imported."""

from __future__ import annotations

import warnings

import pytest

import own_process
from demask.compat import warn_of_newer

NEWER = """
import warnings
import torch
torch.__version__ = "2.99.0"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import demask
    import demask.sparse
    demask.demask
texts = [str(w.message) for w in caught if "tried with torch" in str(w.message)]
assert len(texts) == 1 and "2.99.0" in texts[0], texts
print("one")
"""


@pytest.mark.parametrize("version", ["2.15.0", "3.0.1", "2.20.0a0+git1", "2.15.0.dev20270101"])
def test_newer(version: str) -> None:
    with pytest.warns(UserWarning, match="was tried with torch up to"):
        warn_of_newer(version)


@pytest.mark.parametrize("version", ["2.11.0", "2.14.1+cpu", "2.14.0a0+git1"])
def test_tried(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_newer(version)


def test_importing_demask_warns_once() -> None:
    status, out, err = own_process.run(NEWER)
    assert status == 0 and "one" in out, err
