"""Networks that optimize() chose, in files by content: a second run takes its choice from there.

A name is a hash of all that the choice depends on: the captured graph and its weights, the sizes of
the example, the options, the processor, the versions of torch and of demask's own code. A file
has the network and its measurements. What it computes and that it is not slower is checked again by
`optimize`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.files.archive import from_bytes, to_bytes
from demask.graph.node_records import TensorType
from demask.graph.program import Program
from demask.graph.provenance import GIVEN
from demask.graph.result.demasked_module import Demasked
from demask.machine import clock
from demask.machine.clock import Timing, is_faster
from demask.machine.cost import Costs
from demask.machine.describe import has_wide_spread
from demask.machine.private_files import PrivateFiles, files_digest
from demask.shrink.on_device import CPU
from demask.tune.race import CandidateRace

LIMIT, MOST = 2**30, 2**28  # bytes of all files and of one
EARLIER = "the choice of an earlier run"
ROUNDS = 3  # in which it is compared with the original network; more if they do not suffice
SLOWER = 1.3  # times the present seconds of the original network: then the machine was busy
DATE = "%Y-%m-%d %H:%M UTC"


@dataclass(frozen=True, slots=True)
class OptimizedFile:
    """The file for one network, which may not exist yet."""

    files: PrivateFiles
    name: str

    @classmethod
    def of(cls, race: CandidateRace, costs: Costs, options: object) -> OptimizedFile | None:
        """The file of a race's baseline on its example; None for costs without a file, for a GPU,
        and for what has no name. options: with a repr of their content.

        The folder has the name of the costs file, with the suffix ".networks".
        """
        if costs.path is None or race.device != CPU or race.program is None:
            return None
        folder = costs.path.with_suffix(".networks")
        files, code = PrivateFiles.of(folder, "network", LIMIT, MOST), _code_digest()
        if files is None or code is None:
            return None
        inputs = [_describe_input(leaf) for leaf in pytree.tree_leaves((race.args, race.kwargs))]
        where = (costs.machine, find_spec("llvmlite") is not None, code)
        with suppress(RuntimeError):  # of a tensor without plain memory
            name = network_name(race.program, (inputs, options, where))
            return None if name is None else cls(files, name)
        return None

    def read(self) -> tuple[Demasked | None, str]:
        """The network and when it was measured; None and why the file is not used, "" for none."""
        content = self.files.read(self.name)
        if content is None:
            return None, "it is damaged, or open to others" if self.files.has(self.name) else ""
        date, _, archive = content.partition(b"\n")
        try:
            return from_bytes(archive), date.decode()
        except (BadInput, UnicodeError) as error:
            return None, str(error)

    def write(self, network: Demasked) -> None:
        """Write a chosen candidate that was measured on a quiet machine, with the present time;
        does nothing for others, and for what cannot be stored."""
        speed = network.demasked.speed
        if speed is None or network.demasked.decisions[0].chosen == GIVEN:
            return
        if has_wide_spread([Timing(*row, speed.pairs) for row in (speed.given, speed.result)]):
            return
        now, record = datetime.now(UTC).strftime(DATE), network.demasked
        notes = tuple(note for note in record.notes if not note.startswith(EARLIER))
        try:
            network.demasked = replace(record, notes=notes)
            content = to_bytes(network)
        except BadInput:
            return
        finally:
            network.demasked = record
        self.files.write(self.name, now.encode() + b"\n" + content)


@dataclass(frozen=True, slots=True)
class EarlierChoice:
    """The network of an earlier run that is chosen again; else None, and notes that say why."""

    network: Demasked | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, race: CandidateRace, file: OptimizedFile | None, progress: Callable[[str], object]) -> EarlierChoice:
        """The network of a file, if it computes what the race's baseline does, and is not slower.

        What an earlier run measured while the machine was busy is measured anew.
        """
        if file is None:
            return cls()
        progress("reading an earlier choice")
        network, date = file.read()
        if network is None:
            return cls(None, (f"{EARLIER}: its file is not used, {date}",) if date else ())
        if reasons := race.admit(EARLIER, network):
            return cls(None, tuple(reasons))
        progress("measuring against the original network")
        rounds = race.against_baseline(EARLIER, ROUNDS)
        if not is_faster(clock.lower_bound(rounds[GIVEN], rounds[EARLIER])):
            rounds = race.against_baseline(EARLIER)
        race.modules.clear()
        now, then = median(rounds[GIVEN]), network.demasked.speed
        ratio = now / median(rounds[EARLIER])
        if not is_faster(clock.lower_bound(rounds[GIVEN], rounds[EARLIER])):
            return cls(None, (f"{EARLIER}: left out, it may be slower now (ratio {ratio:.2f})",))
        if then is None or then.given[0] > SLOWER * now:
            return cls(None, (f"{EARLIER}: left out, the machine was slower when it was chosen",))
        note = (
            f"chosen on {date}, when the times of this report were measured; compared again "
            f"now: equal outputs, {ratio:.2f} x"
        )
        network.demasked = replace(network.demasked, notes=(*network.demasked.notes, note))
        return cls(network)


def network_name(program: Program, more: object) -> str | None:
    """64 hexadecimal digits: of a program's graph and weights, and of the repr of `more`; None if
    texts and numbers do not determine them."""
    text = repr((_graph_text(program.graph), _program_signature(program), more))
    if " at 0x" in text:  # an address: of a function or object without a name
        return None
    digest = hashlib.sha256(text.encode())
    numbers: dict[Any, int] = {}  # of memory: tied weights remain tied
    for name, constant in program.constants.items():
        number = numbers.setdefault(constant.tensor.data_ptr(), len(numbers))
        described = (
            name,
            number,
            constant.name,
            constant.parameter,
            constant.requires_grad,
            constant.persistent,
            constant.aliases,
            constant.declared is None,
        )
        digest.update(repr(described).encode())
        for tensor in (constant.tensor, constant.declared):
            if tensor is not None:
                _hash_tensor(digest, tensor)
    return digest.hexdigest()


def _program_signature(program: Program) -> tuple[Any, ...]:
    """What a program has in addition to its graph and constants."""
    sizes = sorted((str(symbol), size) for symbol, size in program.example.sizes.items())
    return (
        program.in_spec,
        program.out_spec,
        program.names,
        program.notes,
        program.training,
        program.guards,
        program.interface,
        sizes,
    )


def _graph_text(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Each node with its type; nodes in arguments by name."""
    return [
        (node.op, node.name, str(node.target), node.args, dict(node.kwargs), TensorType.of(node.meta.get("val")))
        for node in graph.nodes
    ]


def _describe_input(leaf: Any) -> object:
    """An example input without the values of tensors."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.dtype, tuple(leaf.shape), leaf.stride(), str(leaf.device), leaf.requires_grad


def _hash_tensor(digest: Any, tensor: Tensor) -> None:
    """Add the content of a tensor to a hash. Raises RuntimeError for one without plain memory."""
    plain = tensor.detach().cpu().contiguous()
    digest.update(repr((tensor.dtype, tuple(tensor.shape), tensor.stride())).encode())
    digest.update(plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else b"")


@cache
def _code_digest() -> str | None:
    """Hash of demask's code; None if it was changed after this process began."""
    package = Path(__file__).parents[1]
    return files_digest(sorted(package.rglob("*.py")))
