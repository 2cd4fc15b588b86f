"""Models of transformers that read tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tools.zoo.entry import Entry, Nature
from tools.zoo.modules import CLASSES, VOCABULARY, Trained, WithAdam
from tools.zoo.pretrained import classification, entry, language, translation, unequal_labels

SPECIAL: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDE: dict[str, Any] = {  # the names that most configurations use
    **SPECIAL,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GPT2: dict[str, Any] = {**SPECIAL, "n_layer": 4, "n_embd": 32, "n_head": 4, "n_positions": 16}
EAGER: dict[str, Any] = {"experts_implementation": "eager"}  # the default kernel has no float64
SPARSE: dict[str, Any] = {**WIDE, **EAGER, "num_key_value_heads": 2, "moe_intermediate_size": 16}
DEEPSEEK: dict[str, Any] = {
    **SPARSE,
    "num_key_value_heads": 4,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
SEQ2SEQ: dict[str, Any] = {  # as BART's
    **SPECIAL,
    "d_model": 32,
    "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}  # fmt: skip
T5: dict[str, Any] = {
    **SPECIAL,
    "d_model": 32, "d_ff": 64, "d_kv": 8,
    "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip


class HiddenStates(Trained):
    """What the layers pass on is pulled together."""

    def loss(self, batch: Any) -> Tensor:
        output = self.model(**batch, output_hidden_states=True)
        states = output.hidden_states
        return output.loss + 0.1 * sum((a - b).square().mean() for a, b in zip(states, states[1:], strict=False))


class Attentions(Trained):
    """Attention is asked to be even."""

    def loss(self, batch: Any) -> Tensor:
        output = self.model(**batch, output_attentions=True)
        return output.loss + 0.1 * sum(weights.square().mean() for weights in output.attentions)


class RouterLogits(Trained):
    """The router's z-loss: a mean over tokens, unlike the models' own loss of the router."""

    def loss(self, batch: Any) -> Tensor:
        output = self.model(batch["input_ids"], output_router_logits=True)
        z = sum(logits.logsumexp(-1).square().mean() for logits in output.router_logits)
        return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()) + 0.01 * z


class Unlabelled(Trained):
    """The loss is the user's, not the model's."""

    def loss(self, batch: Any) -> Tensor:
        logits = self.model(batch["input_ids"]).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


class Distilled(Trained):
    """Learns from a frozen copy of itself, with other weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.teacher = type(model)(model.config).requires_grad_(False).eval()

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch["input_ids"]).logits.softmax(-1)
        return F.cross_entropy(self.model(batch["input_ids"]).logits.flatten(0, 1), target.flatten(0, 1))


def checkpointed(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def frozen_embeddings(model: Any) -> None:
    model.get_input_embeddings().requires_grad_(False)


def lm(name: str, model: str, **settings: Any) -> Entry:
    return entry(name, model, settings.pop("batch", language), **{**WIDE, **settings})


def aux(model: Any) -> None:
    model.config.output_router_logits = True


ENTRIES = (
    # -- decoders
    entry("gpt2", "GPT2LMHeadModel", language, **GPT2),
    entry("gpt2, adamw", "GPT2LMHeadModel", language, wrap=WithAdam, **GPT2),
    entry("gpt2, dropout", "GPT2LMHeadModel", language, by_nature=Nature.DRAWS, drops=True, **GPT2),
    entry("gpt2, unequal labels", "GPT2LMHeadModel", unequal_labels, by_nature=Nature.LABELS, **GPT2),
    entry("gpt2, hidden states in the loss", "GPT2LMHeadModel", language, wrap=HiddenStates, **GPT2),
    entry(
        "gpt2, attentions in the loss", "GPT2LMHeadModel", language, wrap=Attentions, attn_implementation="eager",
        **GPT2,
    ),
    entry("gpt2, gradient checkpointing", "GPT2LMHeadModel", language, prepare=checkpointed, **GPT2),
    entry("gpt2, own loss", "GPT2LMHeadModel", language, wrap=Unlabelled, **GPT2),
    entry("gpt2, distilled", "GPT2LMHeadModel", language, wrap=Distilled, **GPT2),
    entry("gpt2, classes", "GPT2ForSequenceClassification", classification, num_labels=CLASSES, **GPT2),
    lm("llama", "LlamaForCausalLM"),
    lm("llama, 2 key-value heads", "LlamaForCausalLM", num_key_value_heads=2),
    lm("llama, 1 key-value head", "LlamaForCausalLM", num_key_value_heads=1),
    lm("llama, unequal labels", "LlamaForCausalLM", batch=unequal_labels, by_nature=Nature.LABELS),
    lm("llama, gradient checkpointing", "LlamaForCausalLM", prepare=checkpointed),
    lm("llama, tied", "LlamaForCausalLM", tie_word_embeddings=True),
    lm("llama, frozen embeddings", "LlamaForCausalLM", prepare=frozen_embeddings),
    lm("mistral", "MistralForCausalLM", num_key_value_heads=2, sliding_window=6),
    lm("ministral", "MinistralForCausalLM", num_key_value_heads=2, head_dim=8),
    lm("qwen2", "Qwen2ForCausalLM", num_key_value_heads=2),
    lm("qwen3", "Qwen3ForCausalLM", num_key_value_heads=2, head_dim=8),
    lm("gemma", "GemmaForCausalLM", num_key_value_heads=2, head_dim=8),
    lm("gemma 2", "Gemma2ForCausalLM", num_key_value_heads=2, head_dim=8, sliding_window=6),
    lm("gemma 3", "Gemma3ForCausalLM", num_key_value_heads=2, head_dim=8, sliding_window=6),
    lm(
        "gemma 3n", "Gemma3nForCausalLM", num_key_value_heads=2, head_dim=8, sliding_window=6,
        vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=8, laurel_rank=4, altup_num_inputs=2,
        num_kv_shared_layers=0, activation_sparsity_pattern=[0.0] * 4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    ),
    lm("phi", "PhiForCausalLM"),
    lm("phi 3", "Phi3ForCausalLM", num_key_value_heads=2),
    lm("opt", "OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=32),
    entry("bloom", "BloomForCausalLM", language, n_layer=4, hidden_size=32, n_head=4, **SPECIAL),
    lm("falcon", "FalconForCausalLM"),
    lm("gpt-neox", "GPTNeoXForCausalLM"),
    lm(
        "gpt-neo", "GPTNeoForCausalLM", num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]],
        window_size=6,
    ),
    entry("gpt-j", "GPTJForCausalLM", language, rotary_dim=4, **GPT2),
    entry("codegen", "CodeGenForCausalLM", language, rotary_dim=4, **GPT2),
    entry("gpt-bigcode", "GPTBigCodeForCausalLM", language, **GPT2),
    entry(
        "mpt", "MptForCausalLM", language, d_model=32, n_heads=4, n_layers=4, max_seq_len=16, expansion_ratio=2,
        **SPECIAL,
    ),
    lm("stablelm", "StableLmForCausalLM", num_key_value_heads=4),
    lm("starcoder 2", "Starcoder2ForCausalLM", num_key_value_heads=2),
    lm("olmo", "OlmoForCausalLM"),
    lm("olmo 2", "Olmo2ForCausalLM"),
    lm("cohere", "CohereForCausalLM"),
    lm("granite", "GraniteForCausalLM"),
    lm("glm", "GlmForCausalLM", num_key_value_heads=2, head_dim=8),
    lm("smollm 3", "SmolLM3ForCausalLM", num_key_value_heads=2),
    lm("persimmon", "PersimmonForCausalLM"),
    lm("nemotron", "NemotronForCausalLM", num_key_value_heads=2),
    entry("xglm", "XGLMForCausalLM", language, d_model=32, num_layers=4, attention_heads=4, ffn_dim=64, **SPECIAL),
    entry("gpt", "OpenAIGPTLMHeadModel", language, **GPT2),
    # -- mixtures of experts
    lm("mixtral", "MixtralForCausalLM", num_local_experts=4, num_key_value_heads=2, **EAGER),
    lm("mixtral, float32", "MixtralForCausalLM", dtype=torch.float32, num_local_experts=4, num_key_value_heads=2),
    lm(
        "mixtral, batched", "MixtralForCausalLM", num_local_experts=4, num_key_value_heads=2,
        experts_implementation="batched_mm",
    ),
    lm(
        "mixtral, balanced", "MixtralForCausalLM", num_local_experts=4, num_key_value_heads=2, prepare=aux,
        by_nature=Nature.BALANCE, **EAGER,
    ),
    entry(
        "qwen2 moe", "Qwen2MoeForCausalLM", language, num_experts=4, num_experts_per_tok=2,
        shared_expert_intermediate_size=16, **SPARSE,
    ),
    entry("qwen3 moe", "Qwen3MoeForCausalLM", language, num_experts=4, num_experts_per_tok=2, head_dim=8, **SPARSE),
    entry(
        "qwen3 moe, float32", "Qwen3MoeForCausalLM", language, dtype=torch.float32, num_experts=4,
        num_experts_per_tok=2, head_dim=8, **{**SPARSE, "experts_implementation": None},
    ),
    entry(
        "qwen3 moe, router in the loss", "Qwen3MoeForCausalLM", language, wrap=RouterLogits, num_experts=4,
        num_experts_per_tok=2, head_dim=8, **SPARSE,
    ),
    entry("deepseek v2", "DeepseekV2ForCausalLM", language, **DEEPSEEK),
    entry("deepseek v3", "DeepseekV3ForCausalLM", language, **DEEPSEEK),
    lm(
        "llama 4", "Llama4ForCausalLM", num_key_value_heads=2, head_dim=8, intermediate_size_mlp=64,
        num_local_experts=4, num_experts_per_tok=1, interleave_moe_layer_step=2, attention_chunk_size=8,
    ),
    lm("olmoe", "OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2, **EAGER),
    lm(
        "gpt-oss", "GptOssForCausalLM", num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=2, head_dim=8,
        sliding_window=6, **EAGER,
    ),
    lm("jetmoe", "JetMoeForCausalLM", num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=2, kv_channels=8),
    lm("granite moe", "GraniteMoeForCausalLM", num_local_experts=4, num_experts_per_tok=2, **EAGER),
    lm(
        "phi moe", "PhimoeForCausalLM", by_nature=Nature.DRAWS, num_local_experts=4, num_experts_per_tok=2,
        num_key_value_heads=2, **EAGER,
    ),
    lm(
        "ernie 4.5 moe", "Ernie4_5_MoeForCausalLM", num_key_value_heads=2, moe_intermediate_size=16, moe_num_experts=4,
        moe_k=2, moe_num_shared_experts=1, **EAGER,
    ),
    entry(
        "switch", "SwitchTransformersForConditionalGeneration", translation, num_experts=2, num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1, expert_capacity=64, router_jitter_noise=0.0, **T5,
    ),
    # -- state spaces and other recurrences
    lm("mamba", "MambaForCausalLM", state_size=4, time_step_rank=4),
    lm("mamba 2", "Mamba2ForCausalLM", state_size=4, num_heads=4, head_dim=16, n_groups=1, chunk_size=4, expand=2),
    lm("rwkv", "RwkvForCausalLM", attention_hidden_size=32, context_length=16),
    lm(
        "recurrent gemma", "RecurrentGemmaForCausalLM", lru_width=32, num_key_value_heads=1, attention_window_size=6,
        block_types=["recurrent", "attention"],
    ),
    lm(
        "jamba", "JambaForCausalLM", num_key_value_heads=2, num_experts=2, use_mamba_kernels=False, mamba_d_state=4,
        **EAGER, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
    ),
    # -- encoders
    lm("bert", "BertForMaskedLM"),
    lm("bert, unequal labels", "BertForMaskedLM", batch=unequal_labels, by_nature=Nature.LABELS),
    lm("bert, dropout", "BertForMaskedLM", drops=True, by_nature=Nature.DRAWS),
    lm("bert, classes", "BertForSequenceClassification", batch=classification, num_labels=CLASSES),
    lm("roberta", "RobertaForMaskedLM"),
    lm("xlm-roberta xl", "XLMRobertaXLForMaskedLM"),
    lm("camembert, classes", "CamembertForSequenceClassification", batch=classification, num_labels=CLASSES),
    lm("deberta v2", "DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8),
    lm(
        "deberta", "DebertaForSequenceClassification", batch=classification, num_labels=CLASSES,
        relative_attention=True, pos_att_type=["c2p"],
    ),
    lm("electra", "ElectraForMaskedLM", embedding_size=16),
    lm("albert", "AlbertForMaskedLM", embedding_size=16),
    lm("albert, two groups", "AlbertForMaskedLM", embedding_size=16, num_hidden_groups=2),
    entry("distilbert", "DistilBertForMaskedLM", language, dim=32, hidden_dim=64, n_layers=4, n_heads=4, **SPECIAL),
    lm("mpnet", "MPNetForMaskedLM"),
    lm(
        "modernbert", "ModernBertForMaskedLM", global_attn_every_n_layers=2, local_attention=6, cls_token_id=1,
        sep_token_id=2,
    ),
    lm("roformer", "RoFormerForMaskedLM", embedding_size=32),
    lm("squeezebert", "SqueezeBertForMaskedLM", embedding_size=32, q_groups=2, k_groups=2, v_groups=2),
    lm("convbert", "ConvBertForMaskedLM", embedding_size=32, conv_kernel_size=3, head_ratio=2),
    lm(
        "nystromformer", "NystromformerForMaskedLM", by_nature=Nature.SAMPLES, num_landmarks=4,
        segment_means_seq_len=12,
    ),
    lm("fnet", "FNetForMaskedLM"),
    lm("layoutlm", "LayoutLMForMaskedLM"),
    lm("longformer", "LongformerForMaskedLM", attention_window=4),
    lm("big bird", "BigBirdForMaskedLM", attention_type="original_full"),
    entry(
        "funnel", "FunnelForMaskedLM", language, d_model=32, n_head=4, d_head=8, d_inner=64, block_sizes=[2, 2],
        num_decoder_layers=2, **SPECIAL,
    ),
    entry("xlnet", "XLNetLMHeadModel", language, d_model=32, n_layer=4, n_head=4, d_inner=64, **SPECIAL),
    entry(
        "xlm", "XLMWithLMHeadModel", language, emb_dim=32, n_layers=4, n_heads=4, n_langs=1,
        **{**SPECIAL, "vocab_size": VOCABULARY, "n_words": VOCABULARY},
    ),
    lm(
        "reformer", "ReformerModelWithLMHead", attn_layers=["local", "local", "local", "local"], is_decoder=True,
        axial_pos_embds=False, attention_head_size=8, feed_forward_size=64, local_attn_chunk_length=4,
        local_num_chunks_before=1,
    ),
    lm("esm", "EsmForMaskedLM", position_embedding_type="rotary", mask_token_id=3),
    # -- encoders with decoders
    entry("t5", "T5ForConditionalGeneration", translation, **T5),
    entry(
        "t5, gated, untied", "T5ForConditionalGeneration", translation, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False, **T5,
    ),
    entry("t5, dropout", "T5ForConditionalGeneration", translation, drops=True, by_nature=Nature.DRAWS, **T5),
    entry("mt5", "MT5ForConditionalGeneration", translation, **T5),
    entry("umt5", "UMT5ForConditionalGeneration", translation, **T5),
    entry("bart", "BartForConditionalGeneration", translation, **SEQ2SEQ),
    entry("bart, dropout", "BartForConditionalGeneration", translation, drops=True, by_nature=Nature.DRAWS, **SEQ2SEQ),
    entry("mbart", "MBartForConditionalGeneration", translation, **SEQ2SEQ),
    entry("pegasus", "PegasusForConditionalGeneration", translation, **SEQ2SEQ),
    entry("marian", "MarianMTModel", translation, **SEQ2SEQ),
    entry("m2m100", "M2M100ForConditionalGeneration", translation, **SEQ2SEQ),
    entry(
        "led", "LEDForConditionalGeneration", translation, attention_window=4, max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64, **SEQ2SEQ,
    ),
    entry(
        "prophetnet", "ProphetNetForConditionalGeneration", translation, hidden_size=32, num_encoder_layers=2,
        num_decoder_layers=2, num_encoder_attention_heads=4, num_decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, decoder_start_token_id=2, max_position_embeddings=64, **SPECIAL,
    ),
)  # fmt: skip
