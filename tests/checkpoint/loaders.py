"""Programs that load checkpoints, in environments of their own, which `make nightly` makes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT, SERVER = Path(__file__).parents[2], Path(__file__).with_name("loader_server.py")
MODULES = {"vllm": "vllm", "mlx": "mlx_lm", "llama": "xllamacpp", "optimum": "optimum"}


class Loader:
    """A program that loads checkpoints. name: "vllm", "mlx" or "llama"."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path):
        self.name, self._process, self._log = name, process, log

    def line(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("READY", "ANSWER ")):
                return line
        raise AssertionError(f"{self.name} ended:\n{self._log.read_text()[-3000:]}")

    def answers(self, path: Path, prompts: Sequence[Any], tokens: int = 16, **more: Any) -> list[dict[str, Any]]:
        """What it generates for prompts, as `loader_server` answers."""
        assert self._process.stdin is not None
        request = {"path": str(path), "prompts": prompts, "tokens": tokens, **more}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answers = json.loads(self.line().removeprefix("ANSWER "))
        assert isinstance(answers, list), f"{self.name}: {answers['error'][-3000:]}"
        return answers


def environment_of(name: str) -> Path:
    """The Python of an environment, or a skipped test where that cannot be had."""
    environment, module = ROOT / f".venv-{name}", MODULES[name]
    if not any(environment.glob(f"lib/python*/site-packages/{module}")):
        pytest.skip(f"{module} is not in {environment.name}: make nightly installs it")
    return environment / "bin" / "python"


@contextmanager
def running(name: str, folder: Path) -> Iterator[Loader]:
    """A loader, or a skipped test where its environment cannot be had. folder: for its messages."""
    python, log = environment_of(name), folder / f"{name}.log"
    call = [str(python), str(SERVER), name]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=folder
        ) as process,
    ):
        loader = Loader(name, process, log)
        try:
            assert loader.line().startswith("READY")
            yield loader
        finally:
            process.kill()
