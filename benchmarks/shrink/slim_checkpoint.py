"""A masked checkpoint folder of TinyLlama's shape and the slim one: time, memory, size, speed.

Its weights are random bfloat16 numbers; half of the units of each layer (45 to 55 %) and one of
four groups of heads, another one in each layer, are zero.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.catalog import DEV, Benchmark
from benchmarks.common.tables import RESULTS, load_average, markdown, provenance
from demask.files.weight_file import WeightFile

BENCHMARK = Benchmark(
    "A masked language model of 1.1 B parameters in a folder: slim, against copying it",
    "20 min", (DEV, "`.venv-llama` for llama.cpp"), quick=None,
)  # fmt: skip
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
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH,
        "intermediate_size": UNITS, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS, "vocab_size": VOCABULARY, "dtype": "bfloat16",
        "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    # llama.cpp's server runs no file without a tokenizer.
    texts = ["t", "1", "t1", *(f"w{k}" for k in range(3, VOCABULARY))]
    words = {"type": "BPE", "vocab": {text: k for k, text in enumerate(texts)}, "merges": ["t 1"]}
    level = {"type": "ByteLevel", "add_prefix_space": False}
    tokenizer = {"model": words, "added_tokens": [], "pre_tokenizer": level}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    size, draw = WIDTH // HEADS, torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,),
              "lm_head.weight": (VOCABULARY, WIDTH)}  # fmt: skip
    inside = {
        "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (GROUPS * size, WIDTH),
        "self_attn.v_proj": (GROUPS * size, WIDTH), "self_attn.o_proj": (WIDTH, WIDTH),
        "mlp.gate_proj": (UNITS, WIDTH), "mlp.up_proj": (UNITS, WIDTH),
        "mlp.down_proj": (WIDTH, UNITS), "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,),
    }  # fmt: skip
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
            rows = {"gate_proj": dead[layer], "up_proj": dead[layer], "q_proj": queries,
                    "k_proj": own, "v_proj": own}  # fmt: skip
            columns = {"down_proj": dead[layer], "o_proj": queries}
            if part in rows:
                values[rows[part]] = 0
            if part in columns:
                values[:, columns[part]] = 0
        return values

    hollow = {n: torch.empty(s, dtype=torch.bfloat16, device="meta") for n, s in shapes.items()}
    WeightFile.write(folder / "model.safetensors", hollow, read, {"format": "pt"})


def anonymous() -> int:
    """Bytes of this process that are in no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def run_slim(source: Path, target: Path, check: bool) -> dict[str, float]:
    """Seconds and memory of one call, in this process; libraries are loaded before."""
    from transformers import LlamaForCausalLM

    import demask.checkpoint as checkpoint

    del LlamaForCausalLM
    peak, done = [anonymous()], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], anonymous())

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
        "seconds": seconds, "before writing": writes - start, "anonymous": peak[0],
        "resident": 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "bytes": report.bytes[1], "removed": report.removed, "removable": report.removable,
        "proof": str(report.proof),  # type: ignore[dict-item]
    }  # fmt: skip


def in_process(source: Path, target: Path, check: bool) -> dict[str, Any]:
    """`run_slim` in a new process."""
    words = [sys.executable, "-m", "benchmarks", "run", "slim_checkpoint", "--", "--one",
             str(source), str(target), str(int(check))]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def timed(call: Callable[[], object]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


def tokens_a_second(folders: dict[str, Path], rounds: int) -> dict[str, list[float]]:
    """Tokens that transformers generates a second, one text, in bfloat16, by folder."""
    from transformers import LlamaForCausalLM

    models = {name: LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
              for name, path in folders.items()}  # fmt: skip
    prompt, rates = torch.arange(3, 11)[None], {name: list[float]() for name in folders}
    for turn in range(rounds + 1):
        for name, model in models.items():
            with torch.no_grad():
                seconds = timed(partial(model.generate, prompt, max_new_tokens=TOKENS,
                                        min_new_tokens=TOKENS, do_sample=False))  # fmt: skip
            if turn:  # the first warms up
                rates[name].append(TOKENS / seconds)
    return rates


def tokens_of_llama_cpp(
    python: Path, base: Path, layers: int, rounds: int
) -> dict[str, list[float]]:
    """Tokens that llama.cpp generates a second from GGUF files, one text, in bfloat16: of a network
    without masks, whose file is as large as the masked one's would be, and of the slim one."""
    import demask.checkpoint as checkpoint

    write_folder(base / "full", layers, masked=False)
    files = {"masked": base / "full", "slim": base / f"masked{layers}"}
    paths = [base / f"{name}.gguf" for name in files]
    for folder, path in zip(files.values(), paths, strict=True):
        checkpoint.slim(folder, path, target="llama.cpp", check=False)
    shutil.rmtree(base / "full")
    rates = {name: list[float]() for name in files}
    for turn in range(rounds + 1):
        words = [str(python), "-c", LLAMA_CPP, str(4 * TOKENS), *map(str, paths)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        answers = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("RATE")]
        for name, rate in zip(files, answers, strict=True):
            if turn:
                rates[name].append(float(rate))
    return rates


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, nargs=2, default=(11, 22), metavar="N",
                        help="of two networks, to project from")  # fmt: skip
    parser.add_argument("--folder", type=Path, help="where there is room for 12 GB")
    parser.add_argument(
        "--llama", type=Path, metavar="PYTHON", help="of an environment with xllamacpp"
    )
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        source, target, check = options.one
        print(json.dumps(run_slim(Path(source), Path(target), check == "1")))
        return
    few, most = options.layers
    before, lines, slopes = load_average(), [], {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        base = Path(name)
        for layers in (few, most):
            source = base / f"masked{layers}"
            write_folder(source, layers)
            times: dict[str, list[dict[str, Any]]] = {"check": [], "no check": []}
            copies: list[float] = []
            for turn in range(options.rounds if layers == most else 1):
                copies.append(timed(partial(shutil.copytree, source, base / "copy")))
                shutil.rmtree(base / "copy")
                for kind in times:
                    target = base / f"slim{layers}"
                    shutil.rmtree(target, ignore_errors=True)
                    times[kind].append(in_process(source, target, kind == "check"))
                    print(layers, turn, kind, times[kind][-1], flush=True)
            size = sum(f.stat().st_size for f in source.iterdir())
            for kind, rows in times.items():
                lines.append([
                    f"{layers} layers, {kind}", f"{size / 1e9:.2f}",
                    f"{rows[0]['bytes'] / 1e9:.2f}",
                    f"{rows[0]['removed']:.1%} of {rows[0]['removable']:.1%}", spread(copies),
                    spread([r["seconds"] for r in rows]),
                    spread([r["before writing"] for r in rows]),
                    f"{max(r['anonymous'] for r in rows) / 2**30:.2f}",
                    f"{max(r['resident'] for r in rows) / 2**30:.2f}",
                ])  # fmt: skip
                slopes[layers, kind] = size, statistics.median(r["seconds"] for r in rows)
            proof = times["check"][-1]["proof"]
        rates = tokens_a_second({"masked": base / f"masked{most}",
                                 "slim": base / f"slim{most}"}, options.rounds)  # fmt: skip
        programs = {f"transformers (bfloat16, one text, {TOKENS} tokens)": rates}
        if options.llama is not None:
            name = f"llama.cpp (bfloat16, sizes by layer, {4 * TOKENS} tokens)"
            python = options.llama.absolute()
            programs[name] = tokens_of_llama_cpp(python, base, most, options.rounds)
    projected = []
    for kind in ("check", "no check"):
        (a, s), (b, t) = slopes[few, kind], slopes[most, kind]
        each = (t - s) / (b - a)
        projected += [f"{billions} B, {kind}: {(s + each * (2e9 * billions - a)) / 60:.1f} min"
                      for billions in (8, 70)]  # fmt: skip
    head = ["folder", "GB", "slim GB", "parameters removed of removable", "copy, s", "slim, s",
            "of it before writing, s", "peak anonymous, GiB", "peak resident, GiB"]  # fmt: skip
    speeds = "; ".join(
        f"{program}: masked {spread(rates['masked'])}, slim {spread(rates['slim'])}, "
        f"{statistics.median(rates['slim']) / statistics.median(rates['masked']):.2f} times as many"
        for program, rates in programs.items()
    )
    text = "\n\n".join([
        "# A masked language model in a folder, and the slim one",
        __doc__.partition("\n\n")[2].strip(),
        markdown(head, lines),
        "Memory includes Python, torch and transformers (0.3 GiB). The comparison runs both "
        f"folders in float32, a module at a time, and generates 32 tokens: {proof}.",
        f"Tokens a second. {speeds}.",
        f"Projected from both sizes, not measured: {'; '.join(projected)}.",
        provenance("slim_checkpoint", "medians and ranges of alternated calls", before=before),
    ])  # fmt: skip
    (RESULTS / "slim_checkpoint.md").write_text(text + "\n")
    print(text)
