"""A masked checkpoint folder of TinyLlama's shape and the slim one: time, memory, size, speed.

Its weights are random bfloat16 numbers; half of the units of each layer (45 to 55 %) and one of
four groups of heads, another one in each layer, are zero.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markdown import Markdown
from torch import Tensor

from architectures import transformers
from benchmarks.common.catalog import DEV, Benchmark
from benchmarks.common.ledger import Cell, Page, Run, Table, save
from benchmarks.traverse.traverse_memory import Failed, fresh, resident
from demask.files.weight_file import WeightFile
from demask.machine.clock import Timing
from demask.machine.describe import load_average

BENCHMARK = Benchmark(
    "A masked language model of 1.1 B parameters in a folder: slim, against copying it",
    "20 min",
    (DEV, "`.venv-llama` for llama.cpp"),
    quick="--rounds 1 --layers 2 3",
    measures=("checkpoint", "shrink", "facts", "files"),
)
WIDTH, UNITS, HEADS, GROUPS, VOCABULARY = 2048, 5632, 32, 4, 32000
TOKENS = 16


# Runs in an environment with xllamacpp: tokens a second of files, in turn.
LLAMA_CPP = """
import json, os, sys, xllamacpp as x
servers = []
for path in sys.argv[2:]:
    params = x.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.n_gpu_layers = path, 256, 1, 0
    params.cpuparams.n_threads = os.cpu_count()
    servers.append(x.Server(params))
options = {"prompt": list(range(3, 11)), "n_predict": int(sys.argv[1]), "temperature": 0.0,
           "ignore_eos": True, "cache_prompt": False}
for server in servers:
    print("RATE", server.handle_completions(options)["timings"]["predicted_per_second"])
sys.stdout.flush()
os._exit(0)
"""


def write_folder(folder: Path, layers: int, masked: bool = True) -> None:
    """A folder. masked: whether some of its weights are zero."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": UNITS,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "vocab_size": VOCABULARY,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
    }
    (folder / "config.json").write_text(json.dumps(config))
    # llama.cpp's server runs no file without a tokenizer.
    texts = ["t", "1", "t1", *(f"w{k}" for k in range(3, VOCABULARY))]
    words = {"type": "BPE", "vocab": {text: k for k, text in enumerate(texts)}, "merges": ["t 1"]}
    level = {"type": "ByteLevel", "add_prefix_space": False}
    tokenizer = {"model": words, "added_tokens": [], "pre_tokenizer": level}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    size, draw = WIDTH // HEADS, torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, WIDTH),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (VOCABULARY, WIDTH),
    }
    inside = {
        "self_attn.q_proj": (WIDTH, WIDTH),
        "self_attn.k_proj": (GROUPS * size, WIDTH),
        "self_attn.v_proj": (GROUPS * size, WIDTH),
        "self_attn.o_proj": (WIDTH, WIDTH),
        "mlp.gate_proj": (UNITS, WIDTH),
        "mlp.up_proj": (UNITS, WIDTH),
        "mlp.down_proj": (WIDTH, UNITS),
        "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,),
    }
    dead = {}
    for k in range(layers):
        shapes |= {f"model.layers.{k}.{name}.weight": shape for name, shape in inside.items()}
        share = 0.45 + 0.1 * k / (layers - 1)
        dead[k] = torch.randperm(UNITS, generator=draw)[: int(share * UNITS)]

    def read(name: str) -> Tensor:
        shape = shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        values = torch.randn(shape, generator=draw).div_(shape[1] ** 0.5).bfloat16()
        if masked and ".layers." in name:
            layer, part = int(name.split(".")[2]), name.split(".")[4]
            own = slice(layer % GROUPS * size, (layer % GROUPS + 1) * size)
            queries = slice(own.start * HEADS // GROUPS, own.stop * HEADS // GROUPS)
            rows = {"gate_proj": dead[layer], "up_proj": dead[layer], "q_proj": queries, "k_proj": own, "v_proj": own}
            columns = {"down_proj": dead[layer], "o_proj": queries}
            if part in rows:
                values[rows[part]] = 0
            if part in columns:
                values[:, columns[part]] = 0
        return values

    hollow = {n: torch.empty(s, dtype=torch.bfloat16, device="meta") for n, s in shapes.items()}
    WeightFile.write(folder / "model.safetensors", hollow, read, {"format": "pt"})


def run_slim(source: Path, target: Path, check: bool) -> dict[str, Any]:
    """Seconds and memory of one call; libraries are loaded before. For a process of its own."""
    import demask.checkpoint as checkpoint

    assert transformers().LlamaForCausalLM
    peak, done = [resident("RssAnon")], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], resident("RssAnon"))

    thread = threading.Thread(target=watch)
    thread.start()
    steps: list[tuple[str, float]] = []
    start = time.monotonic()

    def step(title: str, done: int = 1) -> None:
        steps.append((title, time.monotonic()))

    report = checkpoint.slim(source, target, check=check, progress=step)
    seconds = time.monotonic() - start
    done.set()
    thread.join()
    writes = next(at for title, at in steps if title.startswith("writing"))
    return {
        "seconds": seconds,
        "before writing": writes - start,
        "anonymous": peak[0],
        "resident": resident("VmHWM"),
        "bytes": report.bytes[1],
        "removed": report.removed,
        "removable": report.removable,
        "proof": str(report.proof),
    }


def timed(call: Callable[[], object]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


def seconds_a_token(folders: dict[str, Path], rounds: int) -> list[Timing]:
    """The time of a token that transformers generates, one text, in bfloat16, by folder."""
    network = transformers().LlamaForCausalLM
    models = {name: network.from_pretrained(path, dtype=torch.bfloat16).eval() for name, path in folders.items()}
    prompt, taken = torch.arange(3, 11)[None], {name: list[float]() for name in folders}
    for turn in range(rounds + 1):
        for name, model in models.items():
            with torch.no_grad():
                seconds = timed(
                    partial(model.generate, prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
                )
            if turn:  # the first warms up
                taken[name].append(seconds / TOKENS)
    return [*map(Timing.of, taken.values())]


def seconds_of_llama_cpp(python: Path, base: Path, layers: int, rounds: int) -> list[Timing]:
    """The time of a token that llama.cpp generates from GGUF files, one text, in bfloat16: of a
    network without masks, whose file is as large as the masked one's would be, and of the slim
    one."""
    import demask.checkpoint as checkpoint

    write_folder(base / "full", layers, masked=False)
    files = {"masked": base / "full", "slim": base / f"masked{layers}"}
    paths = [base / f"{name}.gguf" for name in files]
    for folder, path in zip(files.values(), paths, strict=True):
        checkpoint.slim(folder, path, target="llama.cpp", check=False)
    shutil.rmtree(base / "full")
    taken = {name: list[float]() for name in files}
    for turn in range(rounds + 1):
        words = [str(python), "-c", LLAMA_CPP, str(4 * TOKENS), *map(str, paths)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        answers = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("RATE")]
        for name, rate in zip(files, answers, strict=True):
            if turn:
                taken[name].append(1 / float(rate))
    return [*map(Timing.of, taken.values())]


def folders(base: Path, layers: Sequence[int], rounds: int) -> tuple[list[list[Cell]], str]:
    """A line of the table per folder and way; and what the comparison said."""
    lines, proof = list[list[Cell]](), ""
    for count in layers:
        source = base / f"masked{count}"
        write_folder(source, count)
        size = sum(f.stat().st_size for f in source.iterdir())
        times: dict[str, list[dict[str, Any]]] = {"check": [], "no check": []}
        copies: list[float] = []
        for turn in range(rounds if count == max(layers) else 1):
            copies.append(timed(partial(shutil.copytree, source, base / "copy")))
            shutil.rmtree(base / "copy")
            for kind in times:
                target = base / f"slim{count}"
                shutil.rmtree(target, ignore_errors=True)
                answer = fresh(run_slim, source, target, kind == "check")
                if isinstance(answer, Failed):
                    raise SystemExit(answer.reason)
                times[kind].append(answer)
                print(count, turn, kind, times[kind][-1], flush=True)
        proof = times["check"][-1]["proof"]
        for kind, rows in times.items():
            seconds, before = (Timing.of([r[k] for r in rows]) for k in ("seconds", "before writing"))
            lines.append(
                [
                    f"{count} layers, {kind}",
                    size / 1e9,
                    rows[0]["bytes"] / 1e9,
                    100 * rows[0]["removed"],
                    100 * rows[0]["removable"],
                    Timing.of(copies),
                    seconds,
                    before,
                    *(max(r[k] for r in rows) / 2**30 for k in ("anonymous", "resident")),
                ]
            )
    return lines, proof


HEAD = [
    "folder",
    "GB",
    "slim, GB",
    "parameters removed, %",
    "of removable, %",
    "copy, ms",
    "slim, ms",
    "of it before writing, ms",
    "peak anonymous, GiB",
    "peak resident, GiB",
]
TOKEN_HEAD = ["program", "masked, ms a token", "slim, ms a token", "speed"]


TEXT = """
TinyLlama's shape. Weights are random bfloat16 numbers; half of the units of each layer (45 to 55 %)
and one of four groups of heads, another one in each layer, are zero. Times: median (10 %–90 %
quantile). Memory includes Python, torch and transformers (0.3 GiB)."""


def page(lines: Sequence[list[Cell]], proof: str, tokens: Mapping[str, Sequence[Timing]]) -> Page:
    speeds = {name: masked.median / slim.median for name, (masked, slim) in tokens.items()}
    programs = [[name, *timings, speeds[name]] for name, timings in tokens.items()]
    compared = f"""
The comparison runs both folders in float32, a module at a time, and generates 32 tokens: {proof}.
"""
    parts = [TEXT, Table(HEAD, lines), compared, Table(TOKEN_HEAD, programs)]
    fast = ", ".join(f"{speed:.2f} ({name.split()[0]})" for name, speed in speeds.items())
    summary = f"generates {fast} times as many tokens a second as the masked one"
    return Page("A masked language model in a folder, and the slim one", parts, summary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, nargs=2, default=(11, 22), metavar="N", help="of two networks")
    parser.add_argument("--folder", type=Path, help="where there is room for 12 GB")
    parser.add_argument("--llama", type=Path, metavar="PYTHON", help="of an environment with xllamacpp")
    parser.add_argument("--output", type=Path, help="a page of its own, in place of the ledger")
    options = parser.parse_args()
    before, most = load_average(), max(options.layers)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        base = Path(name)
        lines, proof = folders(base, options.layers, options.rounds)
        both = {kind: base / f"{kind}{most}" for kind in ("masked", "slim")}
        program = f"transformers (bfloat16, one text, {TOKENS} tokens)"
        tokens = {program: seconds_a_token(both, options.rounds)}
        if options.llama is not None:
            program = f"llama.cpp (bfloat16, sizes by layer, {4 * TOKENS} tokens)"
            python = options.llama.absolute()
            tokens[program] = seconds_of_llama_cpp(python, base, most, options.rounds)
    run = Run.now(f"{options.rounds} alternated calls", before=before)
    text = save("slim_checkpoint", page(lines, proof, tokens), run, options.output)
    Console().print(Markdown(text))
