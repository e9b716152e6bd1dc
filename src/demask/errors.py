"""Exceptions of demask: a message states what was expected, what came, where, and what to do."""


class DemaskError(Exception):
    """Base of every error that demask raises on purpose.

    Example:
        >>> import demask
        >>> try:
        ...     demask.load("missing.demask")
        ... except demask.DemaskError as error:
        ...     print(type(error).__name__)
        BadInput
    """


class BadInput(DemaskError, ValueError):
    """An argument, a path or a file of the caller is not usable.

    Example:
        >>> import demask
        >>> try:
        ...     demask.demask("model")
        ... except demask.BadInput as error:
        ...     print(str(error).split(";")[0].split(",")[0])
        expected an nn.Module or an ExportedProgram
    """


class RefusedFile(BadInput):
    """A file contains something that could run code or exhaust the machine.

    Example:
        >>> import demask
        >>> issubclass(demask.RefusedFile, demask.BadInput)
        True
    """


class BudgetTooSmall(BadInput):
    """No plan fits the memory budget. least: the smallest budget that is enough, in bytes."""

    def __init__(self, text: str, least: int):
        super().__init__(text)
        self.least = least


class Mismatch(DemaskError, AssertionError):
    """Two networks that should compute the same outputs do not.

    Example:
        >>> import demask, torch
        >>> a, b = torch.nn.Linear(2, 2).eval(), torch.nn.Linear(2, 2).eval()
        >>> try:
        ...     demask.verify(a, b, (torch.ones(1, 2),))
        ... except demask.Mismatch as error:
        ...     print("different")
        different
    """


class TableError(DemaskError, ValueError):
    """An entry of the op table contradicts itself, another entry, or the node it is bound to."""


class NotExportable(DemaskError):
    """The model cannot be captured as one graph.

    op: what stopped the capture. where: "file:line" in the user's code, the module that makes the
    call, or "unknown". advice: what to change. All three are part of the message.

    Example:
        >>> import demask
        >>> demask.NotExportable("a branch on values", "model.py:12", "use torch.where").advice
        'use torch.where'
    """

    def __init__(self, op: str, where: str, advice: str):
        super().__init__(
            f"cannot capture this model: {op}\n  at: {where}\n  what to change: {advice}"
        )
        self.op, self.where, self.advice = op, where, advice


class CaptureDiffers(NotExportable):
    """The graph that torch.export captured does not compute what the model does."""


class NeedsGraph(DemaskError):
    """The demasked network cannot be an instance of the caller's class: not only shapes changed.

    places: the modules concerned, with what would have to be masked in the same way.

    Example:
        >>> import demask
        >>> demask.NeedsGraph("more than shapes changed", ("mask a and b alike",)).places
        ('mask a and b alike',)
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
