"""The package as others get it: built, and installed into clean environments, of which each has
torch, demask's own dependencies, and the packages of one extra."""

import os
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import masked_folders
import test_cli

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
SEARCH = """
import sys, torch
from demask import BadInput, prune
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
try:
    prune.search(net, lambda net: 0.0, (torch.ones(1, 4),), trials=2)
except BadInput as error:
    sys.exit(str(error))
"""
# Per extra: what needs it, as words after `python`.
NEEDS = {
    "onnx": "-m demask slim model.pt2 -o slim.onnx --minimal",
    "transformers": "-m demask slim Llama-masked -o Llama-slim",
    "gguf": "-m demask slim Llama-masked -o Llama-slim.gguf --for llama.cpp",
    "stream": "-m demask stream images.pt2 images.npy result.ome.zarr --memory 64MiB",
    "demo": "-m demask demo --runs 1",
    "plot": "-m demask bench model.pt2 --no-compile --pairs 2 --seconds 1 --plot speed.svg",
    "search": f"-c {shlex.quote(SEARCH)}",
}
# Extras that make something better, and no message asks for.
BETTER = {
    "onnxruntime": "-m demask slim model.pt2 -o slim.onnx --threads 1",
    "gpu": "-c 'import demask.sparse, triton'",
}
BASE = (
    "--version",
    "inspect model.pt2",
    "slim model.pt2 -o slim.pt2",
    "verify model.pt2 slim.pt2",
    "optimize model.pt2 -o fast.demask",
    "lower model.pt2 -o low.pt2 --target slice",
    "stream model.pt2 images.npy result.npy --memory 64MiB",
)


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and the folder in which it is used."""

    folder: Path

    def run(self, words: str) -> subprocess.CompletedProcess[str]:
        """Python, called with these words of a shell, in the folder of the environment."""
        command = [str(self.folder / "bin/python"), *shlex.split(words)]
        clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        return subprocess.run(command, cwd=self.folder, env=clean, capture_output=True, text=True)

    def pip(self, words: str) -> None:
        """Run pip, which has to succeed."""
        done = self.run(f"-m pip --quiet {words}")
        assert done.returncode == 0, done.stderr


def create(folder: Path, torch_from: Environment | None = None) -> Environment:
    """A new environment. torch_from: another one, which has torch and no more; it is read there."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    (site,) = folder.glob("lib/*/site-packages")
    if torch_from is not None:
        (other,) = torch_from.folder.glob("lib/*/site-packages")
        (site / "torch.pth").write_text(f"{other}\n")
    return Environment(folder)


def add_files(environment: Environment) -> None:
    """Networks and images for the commands."""
    network = test_cli.network(masked=True)
    test_cli.write(network, environment.folder / "model.pt2")
    test_cli.write(network[:4], environment.folder / "images.pt2")
    np.save(environment.folder / "images.npy", np.ones((2, 3, 6, 7), np.float32))
    with torch.no_grad():
        masked_folders.write(masked_folders.llama(), environment.folder / "Llama-masked")


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """The folder of the sdist, and of the wheel that is built from it, as `make package` does."""
    builder = create(tmp_path_factory.mktemp("builder") / "env")
    builder.pip("install build twine")
    for words in ("build --outdir dist " + shlex.quote(str(ROOT)), "twine check --strict dist/*"):
        done = builder.run(f"-m {words}")
        assert done.returncode == 0, done.stdout + done.stderr
    return builder.folder / "dist"


@pytest.fixture(scope="module")
def only_torch(tmp_path_factory) -> Environment:
    environment = create(tmp_path_factory.mktemp("torch") / "env")
    environment.pip(f"install --no-compile torch=={torch.__version__}")
    return environment


@pytest.fixture(scope="module")
def base(dist, only_torch, tmp_path_factory) -> Environment:
    """demask without extras."""
    environment = create(tmp_path_factory.mktemp("base") / "env", only_torch)
    environment.pip(f"install {next(dist.glob('*.whl'))}")
    add_files(environment)
    return environment


def test_every_extra_for_users_is_tried():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*NEEDS, *BETTER} == {*extras["optional-dependencies"]} - {"bench", "dev", "docs"}


@pytest.mark.parametrize("words", BASE)
def test_commands_run_without_extras(base, words):
    done = base.run(f"-m demask {words}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("extra", [*NEEDS, *BETTER])
def test_an_extra_alone_is_enough(base, dist, only_torch, tmp_path, extra):
    """Where it is missing the message names a command, which brings it."""
    words, (wheel,) = (NEEDS | BETTER)[extra], dist.glob("*.whl")
    hint = f'pip install "demask[{extra}] @ {wheel.as_uri()}"'
    if extra in NEEDS:
        without = base.run(words)
        assert without.returncode != 0
        first = hint.replace("[gguf]", "[transformers]")  # missed first, and part of the former
        assert first in without.stderr, without.stderr
    environment = create(tmp_path / "env", only_torch)
    environment.pip(hint.removeprefix("pip "))
    assert environment.run("-m pip check").returncode == 0
    add_files(environment)
    done = environment.run(words)
    assert done.returncode == 0, done.stderr


def test_the_sdist_runs_its_tests(dist, tmp_path):
    with tarfile.open(*dist.glob("*.tar.gz")) as file:
        file.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    environment = os.environ | {"PYTHONPATH": str(folder / "src")}
    for words in ("--collect-only", "tests/architecture tests/test_imports.py tests/cli/test_cli_help.py"):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words.split()]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\d+ passed", done.stdout)
