"""Runs in the environment of a program that loads checkpoints, and answers what it generates.

    python loader_server.py vllm|mlx|llama

A request is a line of JSON, {"path": folder or file, "prompts": tokens or texts, "tokens": number};
the answer a line "ANSWER " and a list, of each prompt {"tokens": generated, "logits": ...}, or
{"error": text}. Each is answered by a process of its own.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

Answers = list[dict[str, Any]]


def with_vllm() -> Callable[[dict[str, Any]], Answers]:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams

    def answer(request: dict[str, Any]) -> Answers:
        model = LLM(
            model=request["path"],
            dtype="float32",
            enforce_eager=True,
            max_model_len=64,
            skip_tokenizer_init=True,
            trust_remote_code=request.get("trust", False),
            seed=0,
            max_num_seqs=2,
        )
        settings = SamplingParams(temperature=0.0, max_tokens=request["tokens"], ignore_eos=True, detokenize=False)
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        outputs = model.generate(prompts, settings, use_tqdm=False)
        return [{"tokens": list(output.outputs[0].token_ids)} for output in outputs]

    return answer


def with_mlx() -> Callable[[dict[str, Any]], Answers]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import generate_step

    def answer(request: dict[str, Any]) -> Answers:
        model = load(request["path"])[0]
        answers = []
        for prompt in request["prompts"]:
            steps = generate_step(mx.array(prompt), model, max_tokens=request["tokens"])
            answers.append({"tokens": [int(token) for token, _ in steps]})
        return answers

    return answer


def with_llama() -> Callable[[dict[str, Any]], Answers]:
    import xllamacpp as x

    def answer(request: dict[str, Any]) -> Answers:
        params, kind = x.CommonParams(), x.ggml_type.GGML_TYPE_F32
        params.model.path, params.n_ctx, params.n_parallel = request["path"], 256, 1
        params.cache_type_k = params.cache_type_v = kind
        params.n_gpu_layers, params.cpuparams.n_threads, params.warmup = 0, 1, False
        params.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        server, answers = x.Server(params), []
        for prompt in request["prompts"]:
            result = server.handle_completions(
                {
                    "prompt": prompt,
                    "n_predict": request["tokens"],
                    "temperature": 0.0,
                    "n_probs": 500,
                    "cache_prompt": False,
                    "ignore_eos": True,
                }
            )
            content = result["choices"][0]["logprobs"]["content"]
            answers.append(
                {
                    "tokens": [entry["id"] for entry in content],
                    "first": {entry["id"]: entry["logprob"] for entry in content[0]["top_logprobs"]},
                    "prompt": result["usage"]["prompt_tokens"],
                }
            )
        return answers

    return answer


def main() -> None:
    answer = {"vllm": with_vllm, "mlx": with_mlx, "llama": with_llama}[sys.argv[1]]()
    print("READY", flush=True)
    for line in sys.stdin:
        if child := os.fork():
            status = os.waitpid(child, 0)[1]
            if status:
                print(f'ANSWER {{"error": "the process ended with status {status}"}}', flush=True)
            continue
        try:
            result: Any = answer(json.loads(line))
        except BaseException:
            result = {"error": traceback.format_exc()}
        print(f"ANSWER {json.dumps(result)}", flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
