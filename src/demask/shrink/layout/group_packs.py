"""Packs: consecutive groups of a grouped convolution that become one group.

In a network of the caller's class all groups of a convolution have equally many channels. Where
masks leave different numbers in each, filling every group up to the largest removes little. Several
groups in one, with zeros between them, can be filled up together: the convolution has more weights
then, and the layers before and after it have fewer channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def even_packs(ins: Sequence[int], outs: Sequence[int]) -> list[list[int]]:
    """The most packs of consecutive groups that all have equally many inputs and outputs.

    ins, outs: the channels of each group; groups without any are in no pack.

    >>> even_packs([2, 2, 0, 3, 1], [1, 1, 0, 0, 2])
    [[0, 1], [3, 4]]
    """
    groups = [g for g, pair in enumerate(zip(ins, outs, strict=True)) if any(pair)]
    for count in range(len(groups), 1, -1):
        packs, full = [[]], (sum(ins) / count, sum(outs) / count)
        for g in groups:
            if (sum(ins[k] for k in packs[-1]), sum(outs[k] for k in packs[-1])) == full:
                packs.append([])
            packs[-1].append(g)
        if all((sum(ins[k] for k in p), sum(outs[k] for k in p)) == full for p in packs):
            return packs
    return [groups]


def choose_packs(
    ins: Sequence[int], outs: Sequence[int], most: tuple[int, int], weights: tuple[int, int, int]
) -> list[list[int]]:
    """The packs of consecutive groups for which, filled up to the largest, fewest weights are left.

    ins, outs: the live channels of each group. most: the inputs and outputs of a group. weights:
    per pair of an input and an output of the convolution (its taps), per input channel in other
    layers, and per output channel in other layers.
    """

    def count(packs: list[list[int]]) -> int | None:
        sizes = []
        for channels, limit in zip((ins, outs), most, strict=True):
            size = max(1, *(sum(channels[g] for g in pack) for pack in packs))
            if any(len(pack) * limit < size for pack in packs):
                return None
            sizes.append(size)
        taps, before, after = weights
        return len(packs) * (sizes[0] * sizes[1] * taps + sizes[0] * before + sizes[1] * after)

    living = [[g] for g, pair in enumerate(zip(ins, outs, strict=True)) if any(pair)]
    candidates = [living, *_balanced(ins, outs, weights)] if living else [living]
    counted = [(n, packs) for packs in candidates if packs and (n := count(packs)) is not None]
    return min(counted, key=lambda pair: pair[0])[1] if counted else living


def _balanced(ins: Sequence[int], outs: Sequence[int], weights: tuple[int, int, int]) -> Iterator[list[list[int]]]:
    """Packs of all groups with about equally many channels, fewer and fewer of them."""
    loads = [i * max(weights[1], 1) + o * max(weights[2], 1) for i, o in zip(ins, outs, strict=True)]
    limit, previous = float(max(loads)), 0
    while previous != 1:
        packs, load = [[]], 0.0
        for g, more in enumerate(loads):
            if packs[-1] and load + more > limit:
                packs.append([])
                load = 0.0
            packs[-1].append(g)
            load += more
        if len(packs) != previous:
            yield packs
        previous, limit = len(packs), limit * 1.05
