"""Classes of transformers with tiny configs: most checkpoints are of the first ones."""

from __future__ import annotations

from typing import Any

TEXT = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
}
LLAMA = {**TEXT, "intermediate_size": 96, "num_hidden_layers": 4, "num_key_value_heads": 2}
WIDE = {**LLAMA, "head_dim": 16}
ENCODER = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
}
BART = {"d_model": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_layers": 2,
        "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "vocab_size": 100, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip
T5 = {
    "d_model": 64,
    "d_ff": 96,
    "d_kv": 16,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "vocab_size": 100,
    "decoder_start_token_id": 0,
}
IMAGE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
GPT2 = {
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": 64,
    "n_inner": 96,
    "vocab_size": 100,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SOUND = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "vocab_size": 32,
    "num_attention_heads": 4,
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
TWO = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION = {**TWO, "image_size": 32, "patch_size": 8}
LATENT = {
    **LLAMA,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "n_group": 1,
    "topk_group": 1,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}

Table = dict[str, tuple[str, dict[str, Any]]]  # by model type: the class, and numbers of the config
FAMILIES: Table = {
    "llama": ("LlamaForCausalLM", LLAMA),
    "mistral": ("MistralForCausalLM", LLAMA),
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", WIDE),
    "gemma2": ("Gemma2ForCausalLM", WIDE),
    "gemma3_text": ("Gemma3ForCausalLM", WIDE),
    "phi3": ("Phi3ForCausalLM", LLAMA),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt_neox": ("GPTNeoXForCausalLM", LLAMA),
    "opt": ("OPTForCausalLM", {**LLAMA, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "bloom": ("BloomForCausalLM", {**TEXT, "n_layer": 3, "n_head": 4}),
    "falcon": ("FalconForCausalLM", {**TEXT, "num_hidden_layers": 3}),
    "olmo2": ("Olmo2ForCausalLM", LLAMA),
    "stablelm": ("StableLmForCausalLM", LLAMA),
    "mixtral": ("MixtralForCausalLM", {**LLAMA, "num_local_experts": 4}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**LLAMA, **EXPERTS, "shared_expert_intermediate_size": 48}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**WIDE, **EXPERTS, "mlp_only_layers": [1]}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {**LATENT, "q_lora_rank": None, "topk_method": "greedy"}),
    "bert": ("BertForMaskedLM", ENCODER),
    "roberta": ("RobertaForMaskedLM", {**ENCODER, "pad_token_id": 1}),
    "t5": ("T5ForConditionalGeneration", T5),
    "bart": ("BartForConditionalGeneration", BART),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            **BART,
            "max_source_positions": 30,
            "max_target_positions": 40,
            "num_mel_bins": 20,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
    "vit": ("ViTForImageClassification", IMAGE),
    "clip": ("CLIPModel", {"text_config": {**TWO, "vocab_size": 100}, "vision_config": VISION}),
}
OTHERS: Table = {
    "gemma": ("GemmaForCausalLM", WIDE),
    "cohere": ("CohereForCausalLM", LLAMA),
    "cohere2": ("Cohere2ForCausalLM", LLAMA),
    "granite": ("GraniteForCausalLM", LLAMA),
    "granitemoe": ("GraniteMoeForCausalLM", {
        **LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "starcoder2": ("Starcoder2ForCausalLM", LLAMA),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", GPT2),
    "gptj": ("GPTJForCausalLM", {**GPT2, "rotary_dim": 8}),
    "gpt_neo": ("GPTNeoForCausalLM", {
        "hidden_size": 64, "num_heads": 4, "num_layers": 4, "intermediate_size": 96,
        "vocab_size": 100, "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 2]]}),
    "phi": ("PhiForCausalLM", LLAMA),
    "persimmon": ("PersimmonForCausalLM", LLAMA),
    "glm4": ("Glm4ForCausalLM", WIDE),
    "exaone4": ("Exaone4ForCausalLM", {**LLAMA, "sliding_window": 8, "sliding_window_pattern": 2}),
    "smollm3": ("SmolLM3ForCausalLM", LLAMA),
    "ernie4_5": ("Ernie4_5ForCausalLM", WIDE),
    "olmoe": ("OlmoeForCausalLM", {**LLAMA, **EXPERTS}),
    "phimoe": ("PhimoeForCausalLM", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "jamba": ("JambaForCausalLM", {
        **LLAMA, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False,
        "mamba_d_state": 8, "mamba_dt_rank": 4}),
    "llama4_text": ("Llama4ForCausalLM", {
        **WIDE, "intermediate_size_mlp": 96, "num_local_experts": 2, "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2}),
    "gpt_oss": ("GptOssForCausalLM", {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "nemotron": ("NemotronForCausalLM", LLAMA),
    "helium": ("HeliumForCausalLM", WIDE),
    "seed_oss": ("SeedOssForCausalLM", WIDE),
    "arcee": ("ArceeForCausalLM", WIDE),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**LATENT, "q_lora_rank": 24}),
    "distilbert": ("DistilBertForMaskedLM", {
        "dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4, "vocab_size": 100,
        "max_position_embeddings": 64}),
    "electra": ("ElectraForMaskedLM", {**ENCODER, "embedding_size": 64}),
    "modernbert": ("ModernBertForMaskedLM", {
        **ENCODER, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
        "sep_token_id": 2}),
    "albert": ("AlbertForMaskedLM", {**ENCODER, "embedding_size": 32}),
    "esm": ("EsmForMaskedLM", {**ENCODER, "pad_token_id": 1, "mask_token_id": 4}),
    "pegasus": ("PegasusForConditionalGeneration", BART),
    "m2m_100": ("M2M100ForConditionalGeneration", BART),
    "marian": ("MarianMTModel", {**BART, "pad_token_id": 99, "decoder_start_token_id": 99}),
    "umt5": ("UMT5ForConditionalGeneration", T5),
    "deit": ("DeiTForImageClassification", IMAGE),
    "beit": ("BeitForImageClassification", IMAGE),
    "dinov2": ("Dinov2ForImageClassification", {
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32,
        "patch_size": 8, "mlp_ratio": 2}),
    "siglip": ("SiglipModel", {"text_config": {**TWO, "vocab_size": 100, "projection_size": 64},
                               "vision_config": VISION}),
    "wav2vec2": ("Wav2Vec2ForCTC", SOUND),
    "hubert": ("HubertForCTC", SOUND),
}  # fmt: skip
# Their configs say no widths of feed-forward layers but a multiple of the residual's, as those of
# BLOOM do, or their gates are functions whose zeros are not zero.
KEPT: Table = {
    "mpt": ("MptForCausalLM", {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 64, "vocab_size": 100}),
    "convnext": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2, "image_size": 32},
    ),
    "mamba": (
        "MambaForCausalLM",
        {"hidden_size": 64, "num_hidden_layers": 3, "state_size": 8, "vocab_size": 100, "time_step_rank": 4},
    ),
}
