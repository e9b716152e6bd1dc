"""Private APIs of torch, by topic: no other part of the package names one.

What runs per call or per node is torch's own class or function under a plain name, not a wrapper.
"""

import warnings

import torch

TRIED = (2, 14)  # the newest release of torch with which the tests were run


def warn_of_newer(version: str) -> None:
    """Warn if a version of torch is newer than those with which demask was tried."""
    release = tuple(int(part) for part in version.split(".")[:2])
    if release > TRIED:
        warnings.warn(
            f"demask was tried with torch up to {TRIED[0]}.{TRIED[1]}, and this is {version}; what "
            "it finds is still checked against your network on each call. Please report failures",
            stacklevel=2,
        )


warn_of_newer(torch.__version__)
