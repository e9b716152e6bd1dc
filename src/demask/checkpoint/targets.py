"""What loads a checkpoint, and what it accepts.

Found by experiment on CPUs in November 2026: transformers 5.24, vLLM 0.32.0, mlx-lm 0.32.2,
llama.cpp of October 2026. A family that is not listed for a loader keeps all heads there: some of
its classes compute the width of a head from other numbers of the config, and then load nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """An architecture of llama.cpp in which every layer has sizes of its own.

    Attributes:
        name: as in the file.
        headless: whether layers without heads load: not the first one, whose heads tell their size.
        pairs: whether the two rows of q and k that are rotated together are neighbors.
        fused: whether q, k and v are one tensor, one below the other.
        biases: whether products have biases.
        untied: whether the output has a weight of its own.
        frequencies: whether the file says by what factors the frequencies of rotation differ.
    """

    name: str
    headless: bool
    pairs: bool
    fused: bool = False
    biases: bool = True
    untied: bool = True
    frequencies: bool = True


@dataclass(frozen=True, slots=True)
class LoaderTarget:
    """A loader of checkpoints.

    Attributes:
        name: as `checkpoint.slim` takes it.
        multiple: of units, unless the user says another: what its kernels and quantizers take.
        cut_heads: the model types of which it loads fewer heads than the width has room for; None:
            all that the class of transformers takes.
        architectures: of a loader of GGUF files, by model type, those that it loads; a loader of
            folders has none.
    """

    name: str
    multiple: int = 64
    cut_heads: frozenset[str] | None = None
    architectures: Mapping[str, GgufArchitecture] = field(default_factory=dict)

    def cuts_heads(self, model_type: str) -> bool:
        """Whether it loads models of a type with fewer heads."""
        return self.cut_heads is None or model_type in self.cut_heads


_DECI = GgufArchitecture("deci", headless=True, pairs=True)
_OPENELM = GgufArchitecture(
    "openelm", headless=False, pairs=False, fused=True, biases=False, untied=False,
    frequencies=False,
)  # fmt: skip

TARGETS: Mapping[str, LoaderTarget] = {
    target.name: target
    for target in (
        LoaderTarget("transformers"),
        LoaderTarget(
            "vllm", cut_heads=frozenset({"llama", "mistral", "mixtral", "qwen3", "gemma2"})
        ),
        LoaderTarget(
            "mlx", cut_heads=frozenset({"llama", "qwen3", "gemma2", "gemma3", "gemma3_text"})
        ),
        LoaderTarget(  # blocks of its 8-bit and 4-bit numbers are 32 wide
            "llama.cpp", 32,
            architectures={"llama": _DECI, "mistral": _DECI, "qwen2": _DECI, "qwen3": _OPENELM},
        ),
    )
}  # fmt: skip
