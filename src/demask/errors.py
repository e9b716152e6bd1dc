"""Exceptions of demask: a message states what was expected, what came, where, and what to do."""


class DemaskError(Exception):
    """The base class of the errors that demask raises on purpose.

    The functions in `demask` raise errors of other types in two cases only: TypeError for arguments
    that do not fit the signature, and MemoryError.

    Example:
        >>> import demask
        >>> try:
        ...     demask.load("missing.demask")
        ... except demask.DemaskError as error:
        ...     print(type(error).__name__)
        BadInput
    """


class BadInput(DemaskError, ValueError):
    """The error for an argument, a path or a file that cannot be used; it is a ValueError, too.

    The message says what was expected, what was passed, and what to change.

    Example:
        >>> import demask, torch
        >>> try:
        ...     demask.demask(torch.nn.Linear(4, 2), [torch.ones(1, 4)])
        ... except ValueError as error:
        ...     print(error)
        args must be a tuple of the model's inputs, got list: write (x,) for one input
    """


class RefusedFile(BadInput):
    """The error for a file that could run code or exhaust memory; it is a `BadInput`, too.

    `load` and `from_onnx` check a file before they build its network. They run no code from the
    file.

    Example:
        >>> import demask, tempfile, zipfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with zipfile.ZipFile(f"{folder}/a.demask", "w", zipfile.ZIP_DEFLATED) as file:
        ...         file.writestr("graph.json", "{}")
        ...     try:
        ...         demask.load(f"{folder}/a.demask")
        ...     except demask.RefusedFile as error:
        ...         print(str(error).partition("demask: ")[2])
        entry 'graph.json' is compressed; expected stored entries (zip -0)
    """


class BudgetTooSmall(BadInput):
    """No plan fits the memory budget. least: the smallest budget that is enough, in bytes."""

    def __init__(self, text: str, least: int):
        super().__init__(text)
        self.least = least


class Mismatch(DemaskError, AssertionError):
    """The error for two networks with different outputs; it is an AssertionError, too.

    `verify` raises it, and `to_onnx` and `optimize_onnx` for a file whose outputs differ from those
    of the network. The message names the output and the size of the difference.

    Example:
        >>> import demask, torch
        >>> try:
        ...     demask.verify(torch.nn.ReLU(), torch.nn.Tanh(), (torch.ones(1, 2),))
        ... except demask.Mismatch as error:
        ...     print(str(error).partition(":")[0])
        the networks differ
    """


class TableError(DemaskError, ValueError):
    """An entry of the op table contradicts itself, another entry, or the node it is bound to."""


class NotExportable(DemaskError):
    """The error for a model that cannot be captured or written as one graph.

    Attributes:
        op: the operation that cannot be captured, and why, as text.
        where: "file:line" in the user's code, the name of the module that makes the call, or
            "unknown".
        advice: the change to make, as text. The message contains all three attributes.

    Example:
        >>> import demask, torch
        >>> class Branch(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x if x.sum() > 0 else -x
        >>> try:
        ...     demask.demask(Branch(), (torch.ones(3),))
        ... except demask.NotExportable as error:
        ...     print(error.advice.partition(";")[0])
        this line branches on the values of a tensor
    """

    def __init__(self, op: str, where: str, advice: str):
        super().__init__(f"cannot capture this model: {op}\n  at: {where}\n  what to change: {advice}")
        self.op, self.where, self.advice = op, where, advice


class CaptureDiffers(NotExportable):
    """The graph that torch.export captured does not compute what the model does."""


class NeedsGraph(DemaskError):
    """The error of `demask(result="class")` for what has no class: an exported program, a graph.

    It can be returned with `result="auto"` or `result="graph"`.

    Attributes:
        places: a tuple of texts, the reasons. Default: ().

    Example:
        >>> import demask, torch
        >>> program = torch.export.export(torch.nn.Linear(4, 3), (torch.ones(2, 4),))
        >>> try:
        ...     demask.demask(program, result="class")
        ... except demask.NeedsGraph as error:
        ...     print(error.places[-1])
        an ExportedProgram has no class of its own
    """

    def __init__(self, text: str, places: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.places = places


class FileError(DemaskError, OSError):
    """A file cannot be read or written: a missing folder, no rights, a full disk."""


class InternalError(DemaskError, RuntimeError):
    """A defect of demask.

    where: the public function. reason: the exception raised inside, which is also the cause.
    """

    def __init__(self, where: str, reason: str):
        super().__init__(
            f"{where}() failed inside: {reason}. Nothing was changed. Where its arguments are what "
            "its documentation says, this is a defect of demask: please report it, with the "
            "traceback above and, if you can, the code of the network"
        )
        self.where, self.reason = where, reason
