"""What loads a checkpoint folder, and what it accepts.

Found by experiment on CPUs in November 2026: transformers 5.24, vLLM 0.32.0, mlx-lm 0.32.2. A
family that is not listed for a loader keeps all heads there: some of its classes compute the width
of a head from other numbers of the config, and then load nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoaderTarget:
    """A loader of folders.

    Attributes:
        name: as `checkpoint.slim` takes it.
        cut_heads: the model types of which it loads fewer heads than the width has room for; None:
            all that the class of transformers takes.
    """

    name: str
    cut_heads: frozenset[str] | None = None

    def cuts_heads(self, model_type: str) -> bool:
        """Whether it loads models of a type with fewer heads."""
        return self.cut_heads is None or model_type in self.cut_heads


TARGETS: Mapping[str, LoaderTarget] = {
    target.name: target
    for target in (
        LoaderTarget("transformers"),
        LoaderTarget("vllm", frozenset({"llama", "mistral", "mixtral", "qwen3", "gemma2"})),
        LoaderTarget("mlx", frozenset({"llama", "qwen3", "gemma2", "gemma3", "gemma3_text"})),
    )
}
