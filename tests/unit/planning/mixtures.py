"""Configurations of published mixtures of experts, as their files state them."""

QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "sliding_window": None, "use_sliding_window": False, "max_window_layers": 48,
    "norm_topk_prob": True, "router_aux_loss_coef": 0.001, "rope_theta": 1000000.0,
}  # fmt: skip
QWEN15_MOE = {
    "model_type": "qwen2_moe", "hidden_size": 2048, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 151936,
    "intermediate_size": 5632, "moe_intermediate_size": 1408, "num_experts": 60,
    "num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 21,
}  # fmt: skip
MIXTRAL_8X7B = {
    "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
    "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "sliding_window": None, "output_router_logits": False,
}  # fmt: skip
GPT_OSS_120B = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
    "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4,
    "experts_per_token": 4, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "sliding_window": 128, "swiglu_limit": 7.0,
    "layer_types": ["sliding_attention", "full_attention"] * 18, "initial_context_length": 4096,
    "quantization_config": {"quant_method": "mxfp4"}, "attention_bias": True,
}  # fmt: skip
GLM_45_AIR = {
    "model_type": "glm4_moe", "hidden_size": 4096, "num_hidden_layers": 46,
    "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 128,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "n_group": 1, "topk_group": 1,
}  # fmt: skip
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400,
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "topk_method": "greedy", "ep_size": 1,
    "scoring_func": "softmax", "seq_aux": True, "aux_loss_alpha": 0.001,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
    "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
DEEPSEEK_V32 = {
    **DEEPSEEK_V3, "model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64,
    "index_topk": 2048,
}  # fmt: skip
KIMI_K2 = {
    **DEEPSEEK_V3, "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64,
    "vocab_size": 163840, "n_routed_experts": 384, "first_k_dense_replace": 1,
    "max_position_embeddings": 131072, "n_group": 1, "topk_group": 1,
}  # fmt: skip
QWEN3_NEXT_80B_A3B = {
    "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "intermediate_size": 5120, "moe_intermediate_size": 512, "num_experts": 512,
    "num_experts_per_tok": 10, "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "partial_rotary_factor": 0.25, "norm_topk_prob": True,
}  # fmt: skip
LLAMA4_TEXT = {
    "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48,
    "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 202048,
    "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": 16,
    "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "attention_chunk_size": 8192,
    "no_rope_layers": [], "max_position_embeddings": 10485760, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "use_qk_norm": True, "for_llm_compressor": False,
}  # fmt: skip
LLAMA4_SCOUT = {
    "model_type": "llama4", "text_config": LLAMA4_TEXT, "vision_config": {"hidden_size": 1408},
    "boi_token_index": 200080,
}  # fmt: skip
LLAMA4_MAVERICK = {
    **LLAMA4_SCOUT,
    "text_config": {**LLAMA4_TEXT, "num_local_experts": 128, "interleave_moe_layer_step": 2},
}
MINIMAX_M2 = {
    "model_type": "minimax_m2", "hidden_size": 3072, "num_hidden_layers": 62,
    "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 200064,
    "intermediate_size": 1536, "num_local_experts": 256, "num_experts_per_tok": 8,
    "max_position_embeddings": 196608, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "attn_type_list": [1] * 62, "shared_intermediate_size": 0, "rotary_dim": 64,
}  # fmt: skip
PHI_35_MOE = {
    "model_type": "phimoe", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32064,
    "intermediate_size": 6400, "num_local_experts": 16, "num_experts_per_tok": 2,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "sliding_window": 131072, "lm_head_bias": True, "input_jitter_noise": 0.01,
}  # fmt: skip
OLMOE_1B_7B = {
    "model_type": "olmoe", "hidden_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 50304,
    "intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "clip_qkv": None, "norm_topk_prob": False,
}  # fmt: skip
GLM_47_FLASH = {
    "model_type": "glm4_moe_lite", "hidden_size": 2048, "num_hidden_layers": 47,
    "num_attention_heads": 20, "num_key_value_heads": 20, "vocab_size": 154880,
    "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "v_head_dim": 256, "intermediate_size": 10240, "moe_intermediate_size": 1536,
    "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4,
    "mlp_layer_types": ["dense"] + ["sparse"] * 46, "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_interleave": True,
}  # fmt: skip
QWEN35_35B_A3B = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        **{k: v for k, v in QWEN3_NEXT_80B_A3B.items() if k != "intermediate_size"},
        "model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "vocab_size": 248320,
        "num_experts": 256, "num_experts_per_tok": 8, "attn_output_gate": True,
        "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    },
    "vision_config": {"depth": 27},
}  # fmt: skip
