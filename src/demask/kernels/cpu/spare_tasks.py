"""A cache of kernel tasks, for inputs of the same sizes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Task = TypeVar("Task")
SIZES = 64  # keys of a cache


class SpareTasks(Generic[Key, Task]):
    """Tasks that no thread runs now, by what they are for; several threads may use it at once."""

    def __init__(self) -> None:
        self.tasks: dict[Key, list[Task]] = {}

    def take(self, key: Key, build: Callable[[], Task]) -> Task:
        """A task that is this thread's until it is put back; a new one where none is spare."""
        try:
            return self.tasks[key].pop()
        except (KeyError, IndexError):
            return build()

    def put(self, key: Key, task: Task) -> None:
        """Keep a task for the next run."""
        if key not in self.tasks and len(self.tasks) >= SIZES:
            self.tasks.clear()
        self.tasks.setdefault(key, []).append(task)
