"""Transformers that tests, docs and benchmarks share: small, with random weights, by name."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from anatomy import MASKS, Family
from networks import torchvision

WIDTH, HEADS, UNITS, VOCABULARY, LENGTH, LAYERS = 32, 4, 56, 61, 40, 2
IMAGE, PATCH = 24, 8


@functools.cache
def transformers() -> ModuleType:
    """The module; ImportError where it is not installed.

    It imports torchvision where that is installed, which fails with a CPU torch: see there.
    """
    with contextlib.suppress(ImportError):
        torchvision()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return importlib.import_module("transformers")


@dataclass(frozen=True, slots=True)
class Architecture:
    """How to make a network, how to call it, and where its parts are.

    make: the network with initial weights. inputs: keyword inputs of a batch and a length. family:
    where its parts are. dynamic: per input, the axes that are dynamic. lengths: those that it is
    compared at; the first is that of the example. static: why the length is static. declined: per
    mask kind that it does not have, the reason. heads: of the attention with that name. narrow: a
    float type that its code casts to, whatever its own. hub: does it need transformers?
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int, int, torch.Generator], dict[str, Tensor]]
    family: Family
    dynamic: Mapping[str, tuple[int, ...]]
    lengths: tuple[int, ...] = (7, 11)
    static: str = ""
    declined: Mapping[str, str] = field(default_factory=dict)
    heads: Callable[[str], int] = lambda name: HEADS
    narrow: torch.dtype | None = None
    hub: bool = True

    @property
    def shapes(self) -> dict[str, dict[int, Any]]:
        """What `demask(dynamic_shapes=...)` takes."""
        return {name: dict.fromkeys(axes, Dim.AUTO) for name, axes in self.dynamic.items()}


def built(name: str, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> nn.Module:
    """An architecture's network by name, every parameter drawn, in eval mode."""
    return drawn(ARCHITECTURES[name].make(), generator).to(dtype)


def masked(name: str, kind: str, generator: torch.Generator) -> nn.Module:
    """The network, some of its parameters zeroed: a kind of `anatomy.MASKS`."""
    model, chosen = built(name, generator), ARCHITECTURES[name]
    MASKS[kind](model, chosen.family, chosen.heads)
    return model


def drawn(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """The model in eval mode, every parameter drawn anew: biases and shifts are not zero, scales
    are not one."""
    with torch.no_grad():
        for name, values in model.named_parameters():
            if values.ndim > 1:
                values.normal_(0, math.sqrt(2 * len(values) / values.numel()), generator=generator)
            else:
                values.normal_(float(name.endswith("weight")), 0.3, generator=generator)
    return model.eval()


def token_ids(batch: int, length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def ids(batch: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": token_ids(batch, length, generator)}


def padded(batch: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Texts of different lengths, padded on the right."""
    tokens = token_ids(batch, length, generator)
    mask = torch.ones_like(tokens)
    mask[1::2, length - 2 :] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def pair(batch: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    """A source and a target two tokens shorter."""
    return {
        "input_ids": token_ids(batch, length, generator),
        "decoder_input_ids": token_ids(batch, length - 2, generator),
    }


def images(size: int) -> Callable[[int, int, torch.Generator], dict[str, Tensor]]:
    def make(batch: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
        drawn = torch.randn(batch, 3, size, size, generator=generator, dtype=torch.float64)
        return {"pixel_values": drawn}

    return make


def any_images(batch: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Images as high as `length`, and 8 pixels wider."""
    drawn = torch.randn(batch, 3, length, length + 8, generator=generator, dtype=torch.float64)
    return {"pixel_values": drawn}


def sequences(batch: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {"src": torch.randn(batch, length, WIDTH, generator=generator, dtype=torch.float64)}


IDS = {"input_ids": (0, 1)}
PADDED = IDS | {"attention_mask": (0, 1)}
PAIR = IDS | {"decoder_input_ids": (0, 1)}
IMAGES = {"pixel_values": (0,)}
ONE_SIZE = "it asserts the size of image that it is built for"


def of(model: str, config: str, attention: str = "sdpa", **options: Any) -> Callable[[], nn.Module]:
    """Makes a model of transformers by the names of its classes, from a config's options."""

    def make() -> nn.Module:
        module = transformers()
        settings = getattr(module, config)(**options)
        settings._attn_implementation = attention
        settings.use_cache = False
        return getattr(module, model)(settings)

    return make


# The names that most configs share.
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": UNITS,
    "max_position_embeddings": LENGTH,
}
TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GROUPED: dict[str, Any] = TEXT | TOKENS | {"num_key_value_heads": HEADS // 2, "head_dim": WIDTH // HEADS}
IMAGED: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": UNITS,
    "image_size": IMAGE,
    "patch_size": PATCH,
}


def bert(prefix: str) -> Family:
    return Family(
        (f"{prefix}encoder.layer.*.attention: self.query self.key self.value output.dense",),
        (f"{prefix}encoder.layer.?: intermediate.dense output.dense",),
        ("*_embeddings", "*.output.dense", "*LayerNorm"),
        ("*word_embeddings",),
        f"{prefix}encoder.layer.0",
    )


def llama(norms: bool = True) -> Family:
    return Family(
        ("model.layers.*.self_attn: q_proj k_proj v_proj o_proj",),
        ("model.layers.*.mlp: gate_proj up_proj down_proj",),
        ("*embed_tokens", "*.o_proj", "*.down_proj", *(["*layernorm", "model.norm"] * norms)),
        ("*embed_tokens",),
        "model.layers.0",
    )


def vit(prefix: str) -> Family:
    return Family(
        (f"{prefix}layers.*.attention: q_proj k_proj v_proj o_proj",),
        (f"{prefix}layers.*.mlp: fc1 fc2",),
        ("*embeddings.*_token", "*.position_embeddings", "*.projection", "*.o_proj", "*.fc2", "*layernorm*"),
        ("*.projection",),
        f"{prefix}layers.0",
    )


DINO = Family(
    ("*.attention: q_proj k_proj v_proj o_proj",),
    ("*.mlp: fc1 fc2",),
    ("*embeddings.*_token", "*.position_embeddings", "*.projection", "*.o_proj", "*.fc2", "*.norm?", "*layernorm"),
    ("*.projection",),
    "dinov2.encoder.layer.0",
)


def clip(*more: str, embeddings: str) -> Family:
    return Family(
        ("encoder.layers.*.self_attn: q_proj k_proj v_proj out_proj",),
        ("encoder.layers.*.mlp: fc1 fc2",),
        ("embeddings.*_embedding", "*.out_proj", "*.fc2", "*layer_norm*", *more),
        (embeddings,),
        "encoder.layers.0",
    )


GPT2 = Family(
    ("transformer.h.*.attn: c_attn c_proj",),
    ("transformer.h.*.mlp: c_fc c_proj",),
    ("transformer.wte", "transformer.wpe", "*.c_proj", "*ln_*"),
    ("transformer.wte",),
    "transformer.h.0",
    fused="3hd",
)
T5 = Family(
    ("*SelfAttention: q k v o", "*EncDecAttention: q k v o"),
    ("*DenseReluDense: wi wo",),
    ("shared", "*.o", "*.wo", "*layer_norm"),
    ("shared",),
    "encoder.block.0",
)
BART = Family(
    ("*.self_attn: q_proj k_proj v_proj out_proj", "*.encoder_attn: q_proj k_proj v_proj out_proj"),
    ("*coder.layers.?: fc1 fc2",),
    ("shared", "*embed_positions", "*.out_proj", "*.fc2", "*layer_norm", "*layernorm_embedding"),
    ("shared",),
    "encoder.layers.0",
)
DISTILBERT = Family(
    ("*.attention: q_lin k_lin v_lin out_lin",),
    ("*.ffn: lin1 lin2",),
    ("*_embeddings", "*.out_lin", "*.lin2", "*LayerNorm", "*layer_norm"),
    ("*word_embeddings",),
    "distilbert.transformer.layer.0",
)
ALBERT = Family(
    ("*.attention: query key value dense",),
    ("*albert_layers.0: ffn ffn_output",),
    ("*embedding_hidden_mapping_in", "*.attention.dense", "*.ffn_output", "*layer_norm", "*attention.LayerNorm"),
    ("*word_embeddings",),
    "albert.encoder.albert_layer_groups.0.albert_layers.0",
)
NEOX = Family(
    ("*.attention: query_key_value dense",),
    ("*.mlp: dense_h_to_4h dense_4h_to_h",),
    ("*embed_in", "*.attention.dense", "*.dense_4h_to_h", "*layernorm", "*layer_norm"),
    ("*embed_in",),
    "gpt_neox.layers.0",
    fused="h3d",
)
OPT = Family(
    ("*.self_attn: q_proj k_proj v_proj out_proj",),
    ("*decoder.layers.?: fc1 fc2",),
    ("*embed_tokens", "*embed_positions", "*.out_proj", "*.fc2", "*layer_norm"),
    ("*embed_tokens",),
    "model.decoder.layers.0",
)
PHI = Family(
    ("model.layers.*.self_attn: q_proj k_proj v_proj dense",),
    ("model.layers.*.mlp: fc1 fc2",),
    ("*embed_tokens", "*.dense", "*.fc2", "*layernorm"),
    ("*embed_tokens",),
    "model.layers.0",
)
SWIN = Family(
    ("*.attention: q_proj k_proj v_proj o_proj",),
    ("*.mlp: fc1 fc2",),
    ("*.projection", "*embeddings.norm", "*.o_proj", "*.fc2", "*layernorm*", "*.reduction"),
    ("*.projection",),
    "swin.encoder.layers.0.blocks.0",
)
SEGFORMER = Family(
    ("*.attention: q_proj k_proj v_proj o_proj",),
    ("*.mlp: fc1 fc2",),
    (
        "*patch_embeddings.proj",
        "*patch_embeddings.layer_norm",
        "*.o_proj",
        "*.fc2",
        "*layernorm_*",
        "segformer.stages.?.layer_norm",
    ),
    ("*patch_embeddings.proj",),
    "segformer.stages.0.blocks.0",
)
ENCODER = Family(
    ("layers.*.self_attn: in_proj out_proj",),
    ("layers.?: linear1 linear2",),
    ("*.out_proj", "*.linear2", "*.norm?"),
    (),
    "layers.0",
    fused="3hd",
)
FUSED = Family(
    ("blocks.?: qkv proj",),
    ("blocks.?: fc1 fc2",),
    ("embed", "positions", "*.proj", "*.fc2", "*norm*"),
    ("embed",),
    "blocks.0",
    fused="3hd",
)


class Block(nn.Module):
    """A layer as written by hand: one matrix for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, UNITS), nn.Linear(UNITS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, c)
        x = x + self.proj(y)
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


class Encoder(nn.Module):
    """Blocks as written by hand, over tokens with learned positions; a class per text."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.zeros(1, LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.classify = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.positions[:, : input_ids.shape[1]]
        return self.classify(self.norm(self.blocks(x)).mean(1))


def with_exact_norms(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The network with torch's RMSNorm for its own, which casts to float32 in any dtype."""

    def make_with_exact_norms() -> nn.Module:
        model = make()
        for name, norm in list(model.named_modules()):
            if type(norm).__name__.endswith("RMSNorm"):
                parent, _, leaf = name.rpartition(".")
                weight: Any = norm.weight
                setattr(model.get_submodule(parent), leaf, nn.RMSNorm(len(weight), eps=1e-6))
        return model

    return make_with_exact_norms


def torch_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, UNITS, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS)


def text(family: Family, make: Callable[[], nn.Module], **more: Any) -> Architecture:
    return Architecture(make, ids, family, IDS, **more)


def vision(family: Family, make: Callable[[], nn.Module], **more: Any) -> Architecture:
    return Architecture(make, images(IMAGE), family, IMAGES, (0,), static=ONE_SIZE, **more)


BERT_HEAD = functools.partial(of, "BertForSequenceClassification", "BertConfig", **TEXT)
GPT2_HEAD = functools.partial(
    of,
    "GPT2LMHeadModel",
    "GPT2Config",
    vocab_size=VOCABULARY,
    n_positions=LENGTH,
    n_embd=WIDTH,
    n_layer=LAYERS,
    n_head=HEADS,
    n_inner=UNITS,
    **TOKENS,
)
LLAMA_HEAD = functools.partial(of, "LlamaForCausalLM", "LlamaConfig", **GROUPED)
VIT_HEAD = functools.partial(of, "ViTForImageClassification", "ViTConfig", **IMAGED)
T5_HEAD = functools.partial(
    of,
    "T5ForConditionalGeneration",
    "T5Config",
    vocab_size=VOCABULARY,
    d_model=WIDTH,
    d_kv=WIDTH // HEADS,
    d_ff=UNITS,
    num_layers=LAYERS,
    num_decoder_layers=LAYERS,
    num_heads=HEADS,
)
NARROW = torch.float32

ARCHITECTURES: dict[str, Architecture] = {
    "bert": Architecture(BERT_HEAD(), padded, bert("bert."), PADDED),
    "bert_eager": Architecture(BERT_HEAD("eager"), padded, bert("bert."), PADDED),
    "bert_bare": text(bert(""), of("BertModel", "BertConfig", **TEXT)),
    "gpt2": text(GPT2, GPT2_HEAD()),
    "gpt2_eager": text(GPT2, GPT2_HEAD("eager")),
    "llama": text(llama(), LLAMA_HEAD(), narrow=NARROW),
    "llama_eager": text(llama(), LLAMA_HEAD("eager"), narrow=NARROW),
    "llama_padded": Architecture(LLAMA_HEAD(), padded, llama(), PADDED, narrow=NARROW),
    "llama_exact_norms": text(llama(), with_exact_norms(LLAMA_HEAD())),
    "mistral": text(
        llama(), of("MistralForCausalLM", "MistralConfig", **GROUPED), narrow=NARROW
    ),
    "qwen3": text(llama(), of("Qwen3ForCausalLM", "Qwen3Config", **GROUPED), narrow=NARROW),
    "gemma2": text(
        llama(norms=False), of("Gemma2ForCausalLM", "Gemma2Config", "eager", **GROUPED),
        narrow=NARROW,
    ),
    "t5": Architecture(T5_HEAD(), pair, T5, PAIR, narrow=NARROW),
    "t5_eager": Architecture(T5_HEAD("eager"), pair, T5, PAIR, narrow=NARROW),
    "bart": Architecture(
        of(
            "BartModel", "BartConfig", vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=LAYERS,
            decoder_layers=LAYERS, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
            encoder_ffn_dim=UNITS, decoder_ffn_dim=UNITS, max_position_embeddings=LENGTH,
        ),
        pair, BART, PAIR,
    ),
    "vit": vision(vit("vit."), VIT_HEAD()),
    "vit_eager": vision(vit("vit."), VIT_HEAD("eager"), narrow=NARROW),
    "deit": vision(vit("deit."), of("DeiTForImageClassification", "DeiTConfig", **IMAGED)),
    # Its positions are interpolated, in float32, from those of 3 x 3 patches.
    "dinov2": Architecture(
        of(
            "Dinov2ForImageClassification", "Dinov2Config", mlp_ratio=2,
            **{k: v for k, v in IMAGED.items() if k != "intermediate_size"},
        ),
        any_images, DINO, {"pixel_values": (0, 2, 3)}, (40, 56), narrow=NARROW,
    ),
    "beit": vision(
        vit("beit."),
        of("BeitForImageClassification", "BeitConfig", use_relative_position_bias=True, **IMAGED),
    ),
    "swin": Architecture(
        of(
            "SwinForImageClassification", "SwinConfig", image_size=32, patch_size=2, embed_dim=16,
            depths=[2, 2], num_heads=[2, 4], window_size=4, mlp_ratio=2,
        ),
        images(32), SWIN, IMAGES, (0,), static=ONE_SIZE,
        heads=lambda name: 2 if "encoder.layers.0" in name else 4,
    ),
    "segformer": Architecture(
        of(
            "SegformerForImageClassification", "SegformerConfig", depths=[1, 1],
            num_encoder_blocks=2, hidden_sizes=[16, 32], num_attention_heads=[2, 4],
            sr_ratios=[2, 1], patch_sizes=[3, 3], strides=[2, 2], mlp_ratios=[2, 2],
            decoder_hidden_size=16,
        ),
        images(16), SEGFORMER, IMAGES, (0,), static="its images have one size here",
        heads=lambda name: 2 if "stages.0" in name else 4,
    ),
    "distilbert": Architecture(
        of(
            "DistilBertForSequenceClassification", "DistilBertConfig", vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH, n_layers=LAYERS, n_heads=HEADS, dim=WIDTH,
            hidden_dim=UNITS,
        ),
        padded, DISTILBERT, PADDED,
    ),
    "albert": Architecture(
        of("AlbertForSequenceClassification", "AlbertConfig", embedding_size=16, **TEXT),
        padded, ALBERT, PADDED,
    ),
    "roberta": Architecture(
        of("RobertaForSequenceClassification", "RobertaConfig", **TEXT, **TOKENS),
        padded, bert("roberta."), PADDED,
    ),
    "gpt_neox": text(
        NEOX,
        of("GPTNeoXForCausalLM", "GPTNeoXConfig", rotary_pct=0.5, **TEXT, **TOKENS),
    ),
    "opt": text(
        OPT,
        of(
            "OPTForCausalLM", "OPTConfig", ffn_dim=UNITS, word_embed_proj_dim=WIDTH,
            **{k: v for k, v in TEXT.items() if k != "intermediate_size"},
        ),
    ),
    "phi": text(PHI, of("PhiForCausalLM", "PhiConfig", **TEXT, **TOKENS)),
    "clip_text": text(
        clip("final_layer_norm", embeddings="embeddings.token_embedding"),
        of("CLIPTextModel", "CLIPTextConfig", **TEXT, **TOKENS),
    ),
    "clip_vision": vision(
        clip("embeddings.class_embedding", "pre_layrnorm", "post_layernorm",
             embeddings="embeddings.patch_embedding"),
        of("CLIPVisionModel", "CLIPVisionConfig", **IMAGED),
    ),
    "torch_encoder": Architecture(
        torch_encoder, sequences, ENCODER, {"src": (0, 1)},
        declined={"embedding": "it has none"}, hub=False,
    ),
    "fused_qkv": text(FUSED, Encoder, hub=False),
}  # fmt: skip
