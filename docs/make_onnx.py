"""Writes docs/onnx.md from the table of ONNX ops and the ONNX package's node tests, which it counts
and does not run: run `python docs/make_onnx.py` after a change."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import onnx

from demask.files.onnx import ops
from demask.files.onnx.op_functions import Ops
from demask.files.onnx.ops import ENTRIES

ROOT = Path(__file__).parent.parent
PATH = ROOT / "docs" / "onnx.md"
sys.path[:0] = [str(path) for path in (ROOT / "tests").rglob("*") if path.is_dir()]

import conformance  # noqa: E402

ELSEWHERE = {("", "Constant"): "plan"}  # no function: its value is known before anything runs
HEAD = """# ONNX files

`demask.from_onnx` reads an ONNX file as an `nn.Module`, `demask.to_onnx` writes one. Between the
two, everything that demask does to a network is done to an ONNX file. Both need
the extra `onnx`.

Made by `python docs/make_onnx.py`; a test keeps it so. Counts are those of onnx {version}, whose
newest op set is {opset}.

## In Python

```python
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import prune

import demask

torch.manual_seed(0)
folder, images = Path(tempfile.mkdtemp()), torch.randn(2, 3, 32, 32)
trained = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.ReLU(), nn.Conv2d(16, 4, 3)).eval()
prune.remove(prune.ln_structured(trained[0], "weight", amount=0.5, n=2, dim=0), "weight")
demask.to_onnx(trained, folder / "model.onnx", (images,))  # or a file from elsewhere

net = demask.from_onnx(folder / "model.onnx")
slim = demask.demask(net, (images,))  # same call, same outputs, smaller
demask.verify(net, slim, (images,))
demask.to_onnx(slim, folder / "slim.onnx")
for network in (net, slim):
    print({{name: tuple(p.shape) for name, p in network.named_parameters()}})
```

```text
{printed}
```

- The module takes the file's inputs by position, in the file's order, and returns its one output or
  a tuple of them. Text is passed as NumPy arrays of strings, sequences as lists, a missing
  optional value as `None`.
- Float initializers become parameters, so that `state_dict`, pruning and training work as on any
  module. Quantized weights become parameters of whole numbers, which nothing trains. Buffers are:
  other initializers of integers or booleans, those without axes, the statistics of batch norms, the
  bounds of `Clip`, scales and zero points, and the values of `Constant` nodes. Names stay:
  a dot makes a submodule (`encoder.0.weight`), signs
  that PyTorch does not take become `_`. An initializer that the file lists as an input too has its
  value, and is no argument.
- `demask.from_onnx("speech.onnx", inputs={{"rate": 16000}})` puts constants (numbers, lists,
  arrays) in place of inputs; the module takes the others, and a file written of it has no such
  input. This removes an `If` or a `Loop` whose condition or count is an input.
- Arithmetic on shapes (`Shape`, `Gather`, `Concat`, `Reshape`) is done on sizes, without tensors.
  Sizes that the file names therefore stay dynamic in `demask()`, where the network allows it; the
  report says which were fixed.
- `to_onnx` takes any module with example inputs, or a demasked one without. A network that came
  from an ONNX file keeps the names of its inputs, outputs and dynamic sizes, and its metadata.
  Weights of more than 2 GiB are written to a second file next to it.
- Before a file is written, `to_onnx`, `optimize_onnx` and `demask slim` compare it with the
  original by one rule: both are called with the example, zeros, ones, tiny (1e-9), large (1e4),
  negative and random numbers, also at larger sizes where sizes are dynamic, in ONNX Runtime
  (quantized networks with its optimizations and without) or, where that is missing or cannot, in
  ONNX's reference implementation. Outputs may differ by 84 units in the last place of their largest
  value (1e-5 for float32), or by what rounding alone moves the original's: of its inputs, or of
  every call of a PyTorch network. `tolerance=` replaces both rules, `check=False` leaves the
  comparison out.
- `demask.optimize_onnx(net, "fast.onnx", (images,))` searches the widths that ONNX Runtime is fast
  at, as `demask slim` does; it takes the path of an ONNX file, too.

## On the command line

```sh
demask inspect model.onnx                        # what could go, and what stays for which op
demask slim model.onnx -o slim.onnx              # the file that ONNX Runtime runs fastest
demask slim model.onnx -o slim.onnx --minimal    # the smallest, not measured
demask slim model.onnx --in-place --opset 17
demask slim model.onnx -o slim.onnx --size height=480 --size width=640 --threads 1
demask slim speech.onnx -o slim.onnx --fix rate=16000
demask verify model.onnx slim.onnx
```

`slim` edits the file: nodes, names, op set, IR version, producer, documents and metadata that need
not change are copied byte for byte, integer and 4-bit weights are cut as they are stored, and
weights in other files stay in one. Ops that demask has no function for (`com.microsoft`, text,
undecided control flow) stay whole, and the report names them; the rest is cut. Where an
output differs by more than `--tolerance`, nothing is written, the command exits with 1 and says
which output, where and on which inputs. A file with ops of a domain that nothing here runs is
compared around these; if that fails too, it is refused, and `--check off` writes it unchecked.
`--opset 17` converts the result by `onnx`. `--in-place` replaces the file; files of weights that it
named, and that nothing in the folder names any more, are removed.

Only where editing removes nothing, differs, or is slower than an export by more than 5 %, is the
network exported anew, with op set 20. The smallest file is not always the fastest. `slim` tries
widths in multiples of 1, 4, 8 and 16, calls them and the original in turns in ONNX Runtime
(the extra `onnxruntime`), compares the fastest with the original, and writes the file
unchanged if nothing is faster or smaller.
Without the runtime it rounds widths up to 8.

`--size` gives a dynamic size its number, in example inputs and in what is timed. Its name is the
file's, or input and axis (`image.2`) where the file has none; one name is one size everywhere.
`--input image=photo.npy` (or `.npz`) takes example inputs from files, and `--static` fixes all
sizes to theirs; without it they are seeded numbers that the first ops can work with (positions in a
table, pixels that are divided by 255). `--fix` puts a constant in place of an input, a number or a
list: `--fix rate=16000 --fix scales=[1,1,2,2]`. `--tolerance` allows `.onnx` results a larger
difference. Other commands take `.onnx` files and these options too; what `optimize` finds is fast
in PyTorch, and is written as `.demask` or `.pt2`.

A graph captured on one side of a decision by size (`if h % 32 == 0`) is wrong on the other. A file
refuses such sizes: a `Reshape` of an input, in a node called `only for sizes with h % 32 == 0`,
fails in every runtime.

ONNX Runtime on x86 without VNNI clips the sum of two products of `uint8` and `int8` to 16 bits.
Which two are summed depends on how many channels there are: the demasked file may clip others than
the original. Weights of 7 bits (`reduce_range=True` in ONNX Runtime's tool) clip nothing.

## What is refused

A file is run as it says or refused with a `demask.BadInput` that names the node; no op, attribute
or value is skipped. Refused are

- **ops without a function** in the table below: those of other domains, but some that ONNX
  Runtime's optimizer writes (`com.microsoft.FusedConv`), and
{missing}. Ops that the file defines itself, as functions, run;
- **op sets** newer than the installed onnx package knows. From op set 7 on, each is read as its
  version says. In older ones, nodes with attributes that are gone since (`broadcast`, `is_test`)
  are refused;
- **damaged or planted files**: names defined twice, cycles, tensors with fewer bytes than
  their sizes need; and, as `demask.RefusedFile`, weights outside the file's folder, and functions
  or sizes that would exhaust the machine.

Some networks run as modules, and `demask()`, which needs `torch.export`, refuses them:

- **Control flow decided by values.** An `If` whose condition follows from sizes or constants
  becomes the side it takes, a `Loop` or `Scan` with a fixed number of turns is written out. Where
  the values of inputs decide, `torch.export` cannot record both.
- **Text and sequences** as inputs of the file: `torch.export` takes tensors. Sequences inside are
  fine; as outputs they cannot be written as ONNX again.
- **Boxes compared one by one** (`NonMaxSuppression`): cut the file before it
  (`onnx.utils.extract_model`). Other sizes that values decide are fine (`NonZero`,
  `Compress`), with few exceptions (`Unique`).

Random ops (`RandomNormal`, `Bernoulli`, `Dropout` in training mode, ...) draw from PyTorch's
generator, which `torch.manual_seed` sets. A node's own `seed` is not followed: the standard does
not define which numbers it selects.
"""
TESTS = """
These are the tests that the ONNX package brings for each op. All are run by
[test_onnx_nodes.py](../tests/files/onnx/read/test_onnx_nodes.py); those with float32 alone go on
through `demask()`, back into a file and through ONNX Runtime in
[test_onnx_engine.py](../tests/files/onnx/write/test_onnx_engine.py). Those that fail are known; on
other processors some of them pass:
"""
OPS = """
{count} ops, one PyTorch function each, in a file below `demask/files/onnx/ops`. *node tests*: how
many of the op's pass, in its plain form and written out as the function that ONNX defines it by.
{untested} ops have none of their own.
"""
PRINTED = """\
{'0.weight': (16, 3, 3, 3), '2.weight': (4, 16, 3, 3), '2.bias': (4,)}
{'0.weight': (8, 3, 3, 3), '2.weight': (4, 8, 3, 3), '2.bias': (4,)}"""


def files() -> dict[tuple[str, str], str]:
    """The file of each op's entry, below demask/files/onnx/ops."""
    modules = [(name, module) for name, module in vars(ops).items() if hasattr(module, "OPS")]
    homes = {key: name for name, module in modules for key in module.OPS.entries}
    if homes.keys() != ENTRIES.keys() or not all(isinstance(m.OPS, Ops) for _, m in modules):
        raise ValueError("expected every entry of the table in one file below ops/")
    return homes | ELSEWHERE


def missing() -> str:
    """Ops of ONNX that have no function, and are not replaced by newer ones."""
    newest = {(s.domain, s.name): s for s in onnx.defs.get_all_schemas()}
    lacking = sorted(k for k in newest.keys() - files().keys() if not newest[k].deprecated)
    return ", ".join(f"`{_name(key)}`" for key in lacking)


def _name(key: tuple[str, str]) -> str:
    return ".".join(filter(None, key))


def _filled(text: str) -> str:
    return textwrap.fill(text, 98, initial_indent="  ", subsequent_indent="  ")


def table() -> list[str]:
    """One line per op."""
    whole = Counter(case.key for case in conformance.cases())
    passed = Counter(case.key for case in conformance.cases() if not case.expected)
    lines = ["| op | file | node tests |", "| --- | --- | --: |"]
    for key, name in sorted(files().items()):
        cell = f"{passed[key]} of {whole[key]}" if whole[key] else "none"
        lines.append(f"| `{_name(key)}` | {name} | {cell} |")
    return lines


def totals() -> list[str]:
    """How many tests pass, of all and of those with float32."""
    lines = ["| node tests | pass | of | % |", "| --- | --: | --: | --: |"]
    kinds = {"all": ("all", "some", "none"), "float32 inputs and outputs alone": ("all",),
             "float32 among inputs and outputs": ("all", "some")}  # fmt: skip
    for title, kind in kinds.items():
        chosen = [case for case in conformance.cases() if case.float32 in kind]
        good = sum(not case.expected for case in chosen)
        lines.append(f"| {title} | {good} | {len(chosen)} | {100 * good / len(chosen):.1f} |")
    return lines


def expected() -> list[str]:
    """The tests that may fail, with why: a line per reason."""
    lines = []
    for why in dict.fromkeys(conformance.EXPECTED.values()):
        patterns = [names for names, reason in conformance.EXPECTED.items() if reason == why]
        count = sum(any(fnmatchcase(case.name, names) for names in patterns)
                    for case in conformance.cases())  # fmt: skip
        lines.append(f"- {', '.join(f'`{names}`' for names in patterns)} ({count} tests). {why}")
    return lines


def page() -> str:
    """The whole page."""
    tested = {case.key for case in conformance.cases()}
    untested = len(files().keys() - tested)
    head = HEAD.format(version=onnx.__version__, opset=onnx.defs.onnx_opset_version(),
                       missing=_filled(missing()), printed=PRINTED)  # fmt: skip
    parts = [
        head,
        "## Node tests\n",
        *totals(),
        TESTS,
        *expected(),
        "\n## Ops",
        OPS.format(count=len(files()), untested=untested),
        *table(),
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PATH.write_text(page())
    print(f"{PATH.name}: {len(files())} ops")
