"""A language model's folder: masked, slimmed, loaded as before.

`demask.prune.checkpoint` writes a folder in which the least important units are zero, one module
in memory at a time; folders that were masked by other tools do as well. `demask.checkpoint.slim`
writes a folder of the same class with smaller tensors and a config that says so, and compares the
two.

The model is a tiny LLaMA with random weights. On the command line: `demask slim Llama-masked -o
Llama-slim`, with `--for vllm`, `mlx` or `llama.cpp` for these loaders. See [folders of Hugging
Face](../docs/checkpoints.md).

It prints:

```text
removed 41.3% of 59,552 parameters
units: 256 -> 128
same text: True
```
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import demask

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    bos_token_id=1,
    eos_token_id=2,
)
LlamaForCausalLM(config).save_pretrained("Llama")

demask.prune.checkpoint("Llama", "Llama-masked", amount=0.5)
report = demask.checkpoint.slim("Llama-masked", "Llama-slim")
print(f"removed {report.removed:.1%} of {report.parameters[0]:,} parameters")

masked = AutoModelForCausalLM.from_pretrained("Llama-masked")
slim = AutoModelForCausalLM.from_pretrained("Llama-slim")
print("units:", masked.config.intermediate_size, "->", slim.config.intermediate_size)
prompt = torch.tensor([[5, 9, 21, 7]])
texts = [net.generate(prompt, max_new_tokens=8, do_sample=False) for net in (masked, slim)]
print("same text:", torch.equal(*texts))
