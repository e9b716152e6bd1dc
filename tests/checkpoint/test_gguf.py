"""Files of llama.cpp: their sizes by layer, and that they compute what masked folders do, by a
LLaMA that is written here and, in the nightly suite, by llama.cpp."""

import json

import pytest
import torch
from torch.nn import functional as F

from architectures import transformers
from demask.checkpoint import slim
from demask.errors import BadInput
from loaders import running

gguf = pytest.importorskip("gguf")

VOCABULARY, HEAD, UNITS, GROUPS = 40, 8, (100, 40, 0, 0, 20), (0, 0, 2, 0, 1)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "head_dim": HEAD,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES = {
    "llama": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("Llama", {"rope_scaling": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"num_attention_heads": 8}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
}


def build(kind, dtype=torch.float32, **more):
    """A model of five layers. By layer, `UNITS` are live, of which the others are not computed or
    not read, and `GROUPS` of two groups of heads; biases of the dead stay in the case of biases."""
    name, changes = CASES.get(kind, (kind, {}))
    library = transformers()
    config = library.AutoConfig.for_model(name.lower(), **{**SIZES, **changes, **more})
    model = getattr(library, f"{name}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise * 0.2 + 1 if parameter.ndim == 1 else noise / parameter.shape[1] ** 0.5)
    for k, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        dead = torch.randperm(128, generator=generator)[UNITS[k] :]
        if k % 2:
            mlp.down_proj.weight[:, dead] = 0
        else:
            mlp.gate_proj.weight[dead] = mlp.up_proj.weight[dead] = 0
        gone = 2 - GROUPS[k]
        attention.v_proj.weight[: gone * len(attention.v_proj.weight) // 2] = 0
        if kind == "qwen2":
            attention.v_proj.bias[: gone * len(attention.v_proj.bias) // 2] = 0
        if kind == "biases" and k == 3:  # returns its input
            attention.v_proj.bias[:] = attention.o_proj.bias[:] = mlp.down_proj.bias[:] = 0
        if kind == "biases" and k == 2:
            attention.o_proj.bias[:] = 0
    return model.to(dtype)


def words():
    """A tokenizer of words that no text has, each of which is shown as it is."""
    vocabulary = {"t": 0, "1": 1, "t1": 2} | {f"w{k}": k for k in range(3, VOCABULARY)}
    return {
        "model": {"type": "BPE", "vocab": vocabulary, "merges": ["t 1"]},
        "added_tokens": [],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
    }


def write(model, path, tokenizer=None):
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer or words()))
    (path / "tokenizer_config.json").write_text("{}")
    return path


class Llama:
    """What llama.cpp computes from a file, without it."""

    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.fields = {name: field.contents() for name, field in reader.fields.items()}
        self.name = self.fields["general.architecture"]
        self.types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        self.weights = {}
        for tensor in reader.tensors:
            value = torch.from_numpy(tensor.data.copy())
            value = value.view(torch.bfloat16) if value.dtype == torch.uint8 else value
            assert list(value.shape) == list(tensor.shape)[::-1]
            self.weights[tensor.name] = value.float()

    def size(self, key):
        return self.fields[f"{self.name}.{key}"]

    def linear(self, x, name):
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x, name):
        epsilon = self.size("attention.layer_norm_rms_epsilon")
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], epsilon)

    def rotated(self, x):
        """x: [heads, tokens, HEAD]. Pairs that are rotated are neighbors, or halves in openelm."""
        exponents = torch.arange(0, HEAD, 2) / HEAD
        frequencies = 1 / self.size("rope.freq_base") ** exponents
        frequencies = frequencies / self.weights.get("rope_freqs.weight", torch.ones(HEAD // 2))
        angles = torch.arange(x.shape[1])[:, None] * frequencies
        halves = self.name == "openelm"
        a, b = x.chunk(2, -1) if halves else (x[..., 0::2], x[..., 1::2])
        turned = (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin())
        return torch.cat(turned, -1) if halves else torch.stack(turned, -1).flatten(-2)

    def logits(self, tokens):
        x = self.weights["token_embd.weight"][tokens]
        for k in range(self.size("block_count")):
            heads = self.size("attention.head_count")[k], self.size("attention.head_count_kv")[k]
            own = f"blk.{k}."
            if heads[0]:
                y = self.norm(x, own + "attn_norm")
                if self.name == "openelm":
                    every = self.linear(y, own + "attn_qkv")
                else:
                    every = torch.cat([self.linear(y, f"{own}attn_{n}") for n in "qkv"], -1)
                parts = every.view(len(tokens), -1, HEAD).transpose(0, 1)
                q, k_, v = parts.split([heads[0], heads[1], heads[1]])
                if self.name == "openelm":
                    q, k_ = self.norm(q, own + "attn_q_norm"), self.norm(k_, own + "attn_k_norm")
                q, k_ = self.rotated(q), self.rotated(k_)
                k_, v = (t.repeat_interleave(heads[0] // heads[1], 0) for t in (k_, v))
                y = F.scaled_dot_product_attention(q, k_, v, is_causal=True)
                x = x + self.linear(y.transpose(0, 1).flatten(1), own + "attn_output")
            y = self.norm(x, own + "ffn_norm")
            y = F.silu(self.linear(y, own + "ffn_gate")) * self.linear(y, own + "ffn_up")
            x = x + self.linear(y, own + "ffn_down")
        x = self.norm(x, "output_norm")
        return self.linear(x, "output" if "output.weight" in self.weights else "token_embd")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", CASES)
def test_file_has_sizes_by_layer_and_computes_the_same(kind, tmp_path):
    dtype = torch.bfloat16 if kind == "tied" else torch.float32
    model = build(kind, dtype)
    report = slim(write(model, tmp_path / "in"), tmp_path / "out.gguf", target="llama.cpp")
    file = Llama(tmp_path / "out.gguf")
    groups = model.config.num_key_value_heads
    # The fourth layer returns its input. No feed-forward is 0, nor heads of the first layer.
    live = [count * groups // 2 for count in GROUPS]
    live[0] = 1
    if kind == "qwen3":
        live = [max(count, 1) for count in live]
    if kind == "biases":  # of the second layer, whose output has a bias
        live[1] = 1
    del live[3]
    assert file.size("feed_forward_length") == [128, 64, 32, 32]
    assert file.size("attention.head_count_kv") == live
    each = model.config.num_attention_heads // groups
    assert file.size("attention.head_count") == [count * each for count in live]
    assert [row.by_layer for row in report.slices] == [tuple(live), (128, 64, 32, 32)]
    assert report.parameters[1] == sum(w.numel() for w in file.weights.values())
    assert report.layers == {"model.layers": (5, 4)} and report.proof.tokens == 32
    assert report.by_layer["llama.cpp"] == pytest.approx(report.removed, abs=1e-4)
    assert {file.types[n] for n in file.types if n.endswith(("norm.weight", ".bias"))} == {"F32"}
    assert file.types["token_embd.weight"] == ("BF16" if kind == "tied" else "F32")
    tokens = torch.tensor([5, 9, 21, 7, 33, 12, 30, 6])
    model = type(model).from_pretrained(tmp_path / "in", dtype=torch.float32)
    expected = model(tokens[None]).logits[0].detach()
    torch.testing.assert_close(file.logits(tokens), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("Llama", {"hidden_act": "gelu"}, "applies silu, not gelu"),
        ("Mistral", {"sliding_window": 16}, "not to a sliding window"),
        ("Qwen3", {"tie_word_embeddings": False}, "no output weight but"),
        ("Qwen3", {"tie_word_embeddings": True, "attention_bias": True}, "has no biases"),
        ("Qwen3", {"tie_word_embeddings": True, "rope_scaling": LLAMA3}, "no scaled rotation"),
        ("Llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rotations of type"),
        ("Olmo2", {}, "no architecture with sizes by layer for Olmo2ForCausalLM"),
    ],
)
def test_what_a_file_cannot_say_is_refused(name, changes, words, tmp_path):
    folder = write(build(name, **changes), tmp_path / "in")
    with pytest.raises(BadInput, match=words) as caught:
        slim(folder, tmp_path / "out.gguf", target="llama.cpp")
    assert "write the folder for transformers, and convert that" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_file_is_named_so_and_new(tmp_path):
    folder = write(build("llama"), tmp_path / "in")
    with pytest.raises(BadInput, match=r"a \.gguf file"):
        slim(folder, tmp_path / "out", target="llama.cpp")
    (tmp_path / "out.gguf").write_text("mine")
    with pytest.raises(BadInput, match="exists"):
        slim(folder, tmp_path / "out.gguf", target="llama.cpp")
    assert (tmp_path / "out.gguf").read_text() == "mine"


def test_a_report_says_what_sizes_by_layer_would_save(tmp_path):
    report = slim(write(build("llama"), tmp_path / "in"), tmp_path / "out")
    assert list(report.by_layer) == ["vllm", "llama.cpp"]
    assert report.removed < report.by_layer["llama.cpp"] < report.removable
    assert f"llama.cpp {report.by_layer['llama.cpp']:.1%}" in str(report)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", ["transformers", "llama.cpp"])
def test_a_bias_of_zeros_takes_constants(target, tmp_path):
    """What such a bias is added to may be known altogether, and would then have no reader."""
    model = build("Llama", attention_bias=True, num_key_value_heads=4)
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight[: 2 * HEAD] = 0
        layer.self_attn.o_proj.bias[:] = 0
    model.model.layers[1].self_attn.v_proj.weight[:] = 0
    report = slim(write(model, tmp_path / "in"), tmp_path / "out.gguf", target=target)
    (row,) = (row for row in report.slices if row.kind == "head")
    assert row.live == (0, 2) and report.proof.difference < 1e-5


def test_tokenizer_that_llama_cpp_does_not_know(tmp_path):
    odd = words() | {"pre_tokenizer": {"type": "Whitespace"}}
    folder = write(build("llama"), tmp_path / "in", odd)
    report = slim(folder, tmp_path / "out.gguf", target="llama.cpp", check=False)
    assert "the file has no tokenizer: tokenizer.json is of no kind" in str(report)
    assert Llama(tmp_path / "out.gguf").fields["tokenizer.ggml.model"] == "no_vocab"


# llama.cpp itself. Its texts leave out tokens that are no whole characters: `words` has none.
@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory):
    with running("llama", tmp_path_factory.mktemp("llama")) as loader:
        yield loader


@pytest.mark.nightly
@pytest.mark.parametrize("kind", CASES)
def test_llama_cpp_computes_the_same(kind, llama_cpp, tmp_path):
    model = build(kind)
    slim(write(model, tmp_path / "in"), tmp_path / "out.gguf", target="llama.cpp")
    prompt = [5, 9, 21, 7, 33, 12, 30, 6]
    (found,) = llama_cpp.answers(tmp_path / "out.gguf", [prompt])
    tokens = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, pad_token_id=0)
    assert found["tokens"] == tokens[0, len(prompt) :].tolist()
    expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    actual = torch.tensor([found["first"][str(k)] for k in range(VOCABULARY)])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def tokenizers():
    """Tokenizers of 400 tokens at most, by what llama.cpp calls their splits."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    from demask.checkpoint.gguf_file import _SPLITS

    text = [
        "The quick brown fox jumps over the lazy dog's back in 1999, and it's 12345 times\n\n"
        "  def f(x):\n    return x+1",
        "masked networks become smaller networks; the answer is the same, never slower",
    ] * 20
    level = pre_tokenizers.ByteLevel
    for (pattern, ignores), name in _SPLITS.items():
        tokenizer = Tokenizer(models.BPE(ignore_merges=ignores))
        steps = [level(add_prefix_space=False, use_regex=pattern is None)]
        if pattern is not None:
            steps.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if pattern else steps[0]
        tokenizer.train_from_iterator(
            text, trainers.BpeTrainer(vocab_size=380, show_progress=False, initial_alphabet=level.alphabet())
        )
        tokenizer.add_special_tokens(["<|end|>"])
        tokenizer.add_tokens(["<think>"])
        yield name, tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(vocab_size=130, show_progress=False))
    learned = json.loads(tokenizer.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{k:02X}>" for k in range(256))]
    names += sorted(learned["vocab"], key=learned["vocab"].get)
    whole = Tokenizer(
        models.BPE(
            {name: k for k, name in enumerate(names)},
            [tuple(pair) for pair in learned["merges"]],
            byte_fallback=True,
            fuse_unk=True,
            unk_token="<unk>",
        )
    )
    whole.normalizer = tokenizer.normalizer
    whole.add_special_tokens(["<unk>", "<s>", "</s>"])
    yield "default", whole


@pytest.mark.nightly
def test_llama_cpp_splits_texts_into_the_same_tokens(llama_cpp, tmp_path):
    text = "The lazy fox's 12345 networks, é 漢  it's  \n\n the same!<think> back"
    model = build("llama", vocab_size=400)
    for name, tokenizer in tokenizers():
        folder, file = tmp_path / name, tmp_path / f"{name}.gguf"
        write(model, folder, json.loads(tokenizer.to_str()))
        report = slim(folder, file, target="llama.cpp", check=False)
        assert not report.notes and Llama(file).fields["tokenizer.ggml.pre"] == name
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        by_text, by_number = llama_cpp.answers(file, [text, tokens])
        assert by_text == by_number and by_text["prompt"] == len(tokens)
