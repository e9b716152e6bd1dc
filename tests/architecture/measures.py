"""Counts of what the layout of the package forbids, read off its source, and sizes.

`python -m architecture.measures` (in `tests`) prints both; tests limit the former alone. Sizes are
advice: look at what is long, and at modules with one importer, before adding to them.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# Private names of torch. Not ops, `torch.__version__` or `torch.utils._pytree`: torch.export takes
# and returns its specs.
PRIVATE = re.compile(
    r"torch(\.(?!ops\b)\w+)*\._(?!_|pytree)|from torch[\w.]* import (\([^)]*|.*)\b_(?!pytree)"
    r"|fx\.experimental|torch\.\w+\._internal|py_kernels|mkldnn"
    r"|\b_(codegen|schema|opname|overloadname|overloadpacket|dispatch_cache)\b"
)
BANNED = (
    "found", "made", "given", "held", "kept", "told", "asked", "spelled", "apart", "beside",
    "behind", "in front of", "stands for", "comes back", "goes", "lies", "wild", "dear", "by day",
    "by night", "turned", "slope",
)  # fmt: skip
# "Held-out data" is the field's term.
WORDS = re.compile(r"(?<![a-zA-Z])(" + "|".join(BANNED) + r")(?![a-zA-Z])(?!-out)")
LONG_FILE, LONG_FUNCTION = 500, 40  # lines
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Files with tables op -> function that rewrites, lowers or runs its calls: the keys say what there
# is a function for, so they stand with the functions and are stated nowhere else.
RULE_TABLES = {
    "files.onnx.write.functions",
    "rewrites.separate_heads",
    "exec.steps.match_calls",
    "stride.accelerator.emit_compute",
    "stride.accelerator.emit_layout",
    "exec.local.carried",
    "tune.fold_affine",
    "tune.join_as_sum",
}


@dataclass(frozen=True)
class Source:
    """A file of the package."""

    path: Path
    name: str  # "demask.shrink.demask"
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    @property
    def part(self) -> str:
        """The part of the package that it belongs to: "shrink"."""
        steps = self.name.split(".")
        return steps[1] if len(steps) > 1 else "__init__"

    @property
    def inner(self) -> str:
        """Its name in the package: "shrink.demask"."""
        return self.name.partition(".")[2]

    @cached_property
    def imports(self) -> list[str]:
        """Modules of the package that it imports, wherever it does."""
        found = []
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.append(node.module)
                found += [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                found += [alias.name for alias in node.names]
        return found

    @cached_property
    def comments(self) -> list[str]:
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return [token.string for token in tokens if token.type == tokenize.COMMENT]

    def names(self) -> Iterator[str]:
        """What it defines: functions, classes, parameters, variables."""
        for node in self.nodes:
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                yield node.name
            elif isinstance(node, ast.arg):
                yield node.arg
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id

    def strings(self) -> Iterator[str]:
        for node in self.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def sources(root: Path) -> list[Source]:
    """The files of a package, `root` its folder."""
    found = []
    for path in sorted(root.rglob("*.py")):
        steps = [root.name, *path.relative_to(root).with_suffix("").parts]
        if steps[-1] == "__init__":
            steps.pop()
        found.append(Source(path, ".".join(steps), path.read_text()))
    return found


def _edges(files: list[Source]) -> dict[str, set[str]]:
    """Which file imports which. A package's own file is imported where a name of it is, which is no
    module."""
    known = {source.name for source in files}
    edges: dict[str, set[str]] = {}
    for source in files:
        imports = edges[source.name] = set()
        for node in source.nodes:
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                imports |= {name if name in known else node.module for name in names}
            elif isinstance(node, ast.Import):
                imports |= {alias.name for alias in node.names}
        edges[source.name] = (imports & known) - {source.name}
    return edges


def _cycles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Groups that import one another (strongly connected components: Tarjan, 1972)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[set[str]] = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in sorted(edges.get(name, ())):
            if other not in number:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], number[other])
        if low[name] == number[name]:
            group = set(stack[stack.index(name) :])
            del stack[stack.index(name) :]
            if len(group) > 1:
                cycles.append(group)

    for name in sorted(edges):
        if name not in number:
            visit(name)
    return cycles


def file_cycles(files: list[Source]) -> int:
    """Groups of files that import one another, packages' own files among them."""
    return len(_cycles(_edges(files)))


def part_cycles(files: list[Source]) -> int:
    """Groups of parts that import one another."""
    edges: dict[str, set[str]] = {}
    part = {source.name: source.part for source in files}
    for name, to in _edges(files).items():
        edges.setdefault(part[name], set()).update(part[other] for other in to)
    return len(_cycles({name: to - {name, "__init__"} for name, to in edges.items() if name != "__init__"}))


def modules_in_strings(files: list[Source]) -> int:
    """Modules named in strings: imports that no reader and no tool follows. `plugins` alone may
    name them."""
    known = {source.name for source in files if source.part != "__init__"}
    return sum(text in known for s in files if s.part != "plugins" for text in s.strings())


def private_names(files: list[Source]) -> int:
    """Files that use private names of torch, outside of `compat`."""
    return sum(bool(PRIVATE.search(s.text)) for s in files if s.part != "compat")


def literal_op_sets(files: list[Source]) -> int:
    """Sets, lists, tuples and tables of two ATen ops or more outside of `ops`."""
    kinds = (ast.Set, ast.Tuple, ast.List, ast.Dict)

    def is_op(node: ast.expr | None) -> bool:
        text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else text
        return bool(re.match(r"(torch\.ops\.)?aten\.\w+\.\w+$", text))

    def ops(node: ast.AST) -> int:
        return sum(map(is_op, node.keys if isinstance(node, ast.Dict) else node.elts))  # type: ignore[attr-defined]

    return sum(
        ops(node) > 1 and not _is_rule_table(s, node)
        for s in files
        if s.part != "ops"
        for node in s.nodes
        if isinstance(node, kinds)
    )


def _is_rule_table(source: Source, node: ast.AST) -> bool:
    """Whether a node is a table of rules in one of RULE_TABLES: every value of its keys is a
    function, or a call of one that returns the rule."""
    if not isinstance(node, ast.Dict) or source.inner not in RULE_TABLES:
        return False
    names = {"self"}.union(
        *(
            {item.name} if isinstance(item, FUNCTIONS) else {alias.asname or alias.name for alias in item.names}
            for item in source.nodes
            if isinstance(item, (*FUNCTIONS, ast.ImportFrom))
        )
    )

    def is_function(value: ast.expr) -> bool:
        if isinstance(value, (ast.Call, ast.Attribute)):
            return is_function(value.func if isinstance(value, ast.Call) else value.value)
        return isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in names)

    rules = zip(node.keys, node.values, strict=True)
    return all(is_function(value) for key, value in rules if key is not None)


def table_imports(files: list[Source]) -> int:
    """Files that import the table of ops itself instead of being given one."""
    return sum(any(name.endswith(".TABLE") for name in s.imports) for s in files if s.part != "ops")


def repeated_classes(files: list[Source]) -> int:
    """Names that more than one class has."""
    names = Counter(node.name.lstrip("_") for s in files for node in s.nodes if isinstance(node, ast.ClassDef))
    return sum(count > 1 for count in names.values())


def ignored_types(files: list[Source]) -> int:
    """Comments that silence the type checker."""
    return sum("type: ignore" in comment for s in files for comment in s.comments)


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = node.body
    if len(body) > 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    return (node.end_lineno or 0) - body[0].lineno + 1


def _functions(files: list[Source]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for source in files:
        yield from (node for node in source.nodes if isinstance(node, FUNCTIONS))


def sizes(files: list[Source]) -> Iterator[str]:
    """Lines of text about the size of a package: of each part, and of what is long or used once."""
    part_lines = Counter[str]()
    for source in files:
        part_lines[source.part] += source.text.count("\n")
    imports = sum(isinstance(node, ast.Import | ast.ImportFrom) for s in files for node in s.nodes)
    yield f"{sum(part_lines.values()):,} lines in {len(files)} files; {imports:,} import statements"
    yield ", ".join(f"{part} {count:,}" for part, count in part_lines.most_common())
    importers = Counter(name for to in _edges(files).values() for name in to)
    single = sorted(name for name, count in importers.items() if count == 1)
    yield f"modules with one importer: {len(single)}"
    ops = [s.inner for s in files if s.part not in ("ops", "compat") and "aten." in s.text]
    yield f"files outside of ops that name an ATen op: {len(ops)}"
    lengths = {
        f"{s.inner}: {node.name}": _length(node) for s in files for node in s.nodes if isinstance(node, FUNCTIONS)
    }
    long = {name: count for name, count in lengths.items() if count > LONG_FUNCTION}
    yield f"functions of more than {LONG_FUNCTION} lines: {len(long)}"
    yield from (f"  {count:4} {name}" for name, count in Counter(long).most_common(10))
    lines = Counter({s.inner: s.text.count("\n") for s in files})
    yield f"files of more than {LONG_FILE} lines: {sum(n > LONG_FILE for n in lines.values())}"
    yield from (f"  {n:4} {name}" for name, n in lines.most_common(10) if n > LONG_FILE)


def banned_names(files: list[Source]) -> int:
    """Names with words that no one in the field uses for it."""
    return sum(bool(WORDS.search(name.replace("_", " "))) for s in files for name in s.names())


def banned_sentences(files: list[Source]) -> int:
    """Strings (docstrings, messages) and comments with such words."""
    return sum(bool(WORDS.search(text)) for s in files for text in (*s.strings(), *s.comments))


def banned_words(source: Source) -> set[str]:
    """Names, strings and comments of a file that have such words; not codes of a type checker."""
    comments = {re.sub(r"type: ignore\[[\w, -]+\]", "", text) for text in source.comments}
    names = {name for name in source.names() if WORDS.search(name.replace("_", " "))}
    return names | {text for text in (*source.strings(), *comments) if WORDS.search(text)}


_EMPTY = {
    "{}",
    "[]",
    "dict()",
    "list()",
    "set()",
    "Counter()",
    "WeakKeyDictionary()",
    "WeakValueDictionary()",
    "OrderedDict()",
    "local()",
}


def module_state(files: list[Source]) -> int:
    """Names of modules that are bound to what is filled or changed later: an empty container, or an
    object of one of the package's classes that holds state."""
    classes = {
        f"{s.name}.{node.name}": (s, node) for s in files for node in s.tree.body if isinstance(node, ast.ClassDef)
    }

    def class_of(source: Source, value: ast.expr) -> tuple[Source, ast.ClassDef] | None:
        """The class that a name, such as `TensorCache` or `cache.TensorCache`, has in a file."""
        value = value.value if isinstance(value, ast.Subscript) else value
        first, _, rest = ast.unparse(value).partition(".")
        for node in source.nodes:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if first == (alias.asname or alias.name):
                        first = f"{node.module}.{alias.name}"
        name = f"{first}.{rest}".rstrip(".")
        return classes.get(name) or classes.get(f"{source.name}.{name}")

    def holds_state(source: Source, node: ast.ClassDef) -> bool:
        above = (class_of(source, base) for base in node.bases)
        return _changes_itself(node) or any(holds_state(*base) for base in above if base)

    def is_state(source: Source, node: ast.stmt) -> bool:
        value = getattr(node, "value", None)
        if value is None or not isinstance(node, (ast.Assign, ast.AnnAssign)):
            return False
        if ast.unparse(value).rpartition(".")[2] in _EMPTY:
            return True
        found = class_of(source, value.func) if isinstance(value, ast.Call) else None
        return found is not None and holds_state(*found)

    return sum(is_state(s, node) for s in files for node in s.tree.body)


_CHANGES = {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem",
            "remove", "setdefault", "update"}  # fmt: skip


def _changes_itself(node: ast.ClassDef) -> bool:
    """Is an object of a class changed after it is built: do methods change its attributes, or is it
    built with an empty container that others can reach? (A private one is the methods' alone.)"""
    for part in ast.walk(node):
        if isinstance(part, ast.keyword) and part.arg == "default_factory":
            return True
        if isinstance(part, (ast.Assign, ast.AnnAssign)) and part.value is not None:
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            texts = {ast.unparse(v).rpartition(".")[2] for v in _each(part.value)}
            if texts & _EMPTY and any(
                re.match(r"self\.[^_]", ast.unparse(to)) for target in targets for to in _each(target)
            ):
                return True
    constructors = ("__init__", "__new__", "__post_init__")
    later = [item for item in node.body if isinstance(item, FUNCTIONS) and item.name not in constructors]
    return any(_is_change(part) for item in later for part in ast.walk(item))


def _is_change(node: ast.AST) -> bool:
    """Does a node of a method change an attribute of the object, or a container that it has?"""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _CHANGES and ast.unparse(node.func.value).startswith("self.")
    stored = isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load)
    return stored and ast.unparse(node).startswith("self.")


def _each(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


MEASURES: dict[str, Callable[[list[Source]], int]] = {
    measure.__name__: measure
    for measure in (
        file_cycles,
        part_cycles,
        modules_in_strings,
        private_names,
        literal_op_sets,
        table_imports,
        repeated_classes,
        ignored_types,
        banned_names,
        banned_sentences,
        module_state,
    )
}


def measured(root: Path) -> dict[str, int]:
    """All counts of the package in a folder."""
    files = sources(root)
    return {name: measure(files) for name, measure in MEASURES.items()}


if __name__ == "__main__":
    package = sources(Path(__file__).parents[2] / "src" / "demask")
    print(*sizes(package), sep="\n")
    print(*(f"{name}: {measure(package)}" for name, measure in MEASURES.items()), sep="\n")
