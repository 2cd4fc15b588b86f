"""Models of transformers that see or hear, and those of several kinds of input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tools.zoo.entry import Nature
from tools.zoo.modules import CLASSES, LENGTH, VOCABULARY, Trained, classes, images, tokens
from tools.zoo.pretrained import entry
from tools.zoo.transformers_text import SEQ2SEQ, WIDE

PIXELS = 16
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "image_size": PIXELS, "patch_size": 4,
}  # fmt: skip
CLASSIFIER: dict[str, Any] = {**VISION, "num_labels": CLASSES}
STAGES: dict[str, Any] = {"num_labels": CLASSES, "depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32]}
SPEECH: dict[str, Any] = {
    "vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "conv_dim": [8, 8], "conv_stride": [4, 4], "conv_kernel": [8, 4], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
    "ctc_loss_reduction": "mean",
}  # fmt: skip
TEXT_PART: dict[str, Any] = {**WIDE, "num_hidden_layers": 2}
VISION_PART: dict[str, Any] = {**VISION, "num_hidden_layers": 2}


def pictures(size: int = PIXELS) -> dict[str, Tensor]:
    return {"pixel_values": images(size), "labels": classes()}


def speech() -> dict[str, Tensor]:
    return {"input_values": torch.randn(8, 400), "labels": torch.randint(1, 16, (8, 4))}


def spectrograms() -> dict[str, Tensor]:
    return {"input_features": torch.randn(8, 8, 48), "labels": tokens(6)}


def captions() -> dict[str, Tensor]:
    return {"pixel_values": images(PIXELS), "input_ids": tokens(6)}


def chats() -> dict[str, Tensor]:
    """Sixteen places for an image's patches, and text."""
    ids = torch.cat([torch.full((8, 16), 3), tokens(6)], 1)
    return {"input_ids": ids, "pixel_values": images(PIXELS), "labels": ids}


class Contrastive(Trained):
    """In-batch negatives."""

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self.model(**batch, return_loss=True).loss
        return loss


class Matching(Trained):
    """Pairs come closer: a mean over samples."""

    def loss(self, batch: Any) -> Tensor:
        output = self.model(**batch)
        return (output.text_embeds - output.image_embeds).square().mean()


class Detector(Trained):
    """Classes and boxes of a fixed assignment: DETR's own matching needs scipy, and lists as labels."""

    def loss(self, batch: Any) -> Tensor:
        output = self.model(pixel_values=batch["pixel_values"])
        logits, boxes = output.logits, output.pred_boxes
        labels = batch["labels"][:, None].expand(logits.shape[:2])
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + (boxes - 0.5).abs().mean()


class Masks(Trained):
    """Predicted masks against targets."""

    def loss(self, batch: Any) -> Tensor:
        output = self.model(pixel_values=batch["pixel_values"], input_points=batch["points"], multimask_output=False)
        masks = output.pred_masks
        return F.mse_loss(masks, torch.ones_like(masks)) + output.iou_scores.square().mean()


class PooledTokens(Trained):
    """A model that returns no loss: its hidden states against targets."""

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.model(**batch["inputs"]).last_hidden_state, batch["target"])


class RecorderOptions(Trained):
    """Image and question in, an answer's class out."""

    def loss(self, batch: Any) -> Tensor:
        labels = F.one_hot(batch["labels"], CLASSES).double()
        loss: Tensor = self.model(**{**batch, "labels": labels}).loss
        return loss


ENTRIES = (
    # -- images
    entry("vit", "ViTForImageClassification", pictures, **CLASSIFIER),
    entry(
        "vit, dropout", "ViTForImageClassification", pictures, drops=True, by_nature=Nature.DRAWS,
        **{**CLASSIFIER, "hidden_dropout_prob": 0.2},
    ),
    entry("deit", "DeiTForImageClassification", pictures, **CLASSIFIER),
    entry("beit", "BeitForImageClassification", pictures, **CLASSIFIER),
    entry("dinov2", "Dinov2ForImageClassification", pictures, **CLASSIFIER),
    entry(
        "vit mae", "ViTMAEForPreTraining", lambda: {"pixel_values": images(PIXELS)}, decoder_hidden_size=32,
        decoder_num_hidden_layers=2, decoder_num_attention_heads=4, decoder_intermediate_size=64,
        by_nature=Nature.DRAWS, **VISION,
    ),
    entry(
        "swin", "SwinForImageClassification", lambda: pictures(32), image_size=32, patch_size=4, embed_dim=8,
        depths=[2, 2], num_heads=[2, 2], window_size=4, num_labels=CLASSES,
    ),
    entry(
        "swin v2", "Swinv2ForImageClassification", lambda: pictures(32), image_size=32, patch_size=4, embed_dim=8,
        depths=[2, 2], num_heads=[2, 2], window_size=4, num_labels=CLASSES,
    ),
    entry("convnext", "ConvNextForImageClassification", lambda: pictures(32), **STAGES),
    entry("convnext v2", "ConvNextV2ForImageClassification", lambda: pictures(32), **STAGES),
    entry(
        "segformer", "SegformerForSemanticSegmentation",
        lambda: {"pixel_values": images(32), "labels": torch.randint(0, CLASSES, (8, 32, 32))},
        num_attention_heads=[1, 2, 2, 2], sr_ratios=[4, 2, 1, 1], decoder_hidden_size=16, by_nature=Nature.STATISTICS,
        **STAGES,
    ),
    entry(
        "segformer, classes", "SegformerForImageClassification", lambda: pictures(32), num_attention_heads=[1, 2, 2, 2],
        sr_ratios=[4, 2, 1, 1], **STAGES,
    ),
    entry(
        "resnet of transformers", "ResNetForImageClassification", lambda: pictures(32), embedding_size=8,
        by_nature=Nature.STATISTICS, layer_type="basic", **STAGES,
    ),
    entry("poolformer", "PoolFormerForImageClassification", lambda: pictures(32), **STAGES),
    entry(
        "pvt", "PvtForImageClassification", lambda: pictures(32), image_size=32, num_attention_heads=[1, 2, 2, 2],
        mlp_ratios=[2, 2, 2, 2], sequence_reduction_ratios=[4, 2, 1, 1], **STAGES,
    ),
    entry(
        "mobilevit", "MobileViTForImageClassification", lambda: pictures(32), image_size=32, hidden_sizes=[16, 16, 16],
        neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 16], num_attention_heads=2, num_labels=CLASSES,
        by_nature=Nature.STATISTICS,
    ),
    entry(
        "videomae", "VideoMAEForVideoClassification",
        lambda: {"pixel_values": torch.randn(8, 4, 3, PIXELS, PIXELS), "labels": classes()}, num_frames=4,
        tubelet_size=2, **CLASSIFIER,
    ),
    entry(
        "timesformer", "TimesformerForVideoClassification",
        lambda: {"pixel_values": torch.randn(8, 2, 3, PIXELS, PIXELS), "labels": classes()}, num_frames=2, **CLASSIFIER,
    ),
    entry(
        "detr", "DetrForObjectDetection", lambda: pictures(32), wrap=Detector, d_model=32, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        num_queries=6, num_labels=CLASSES, use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
        backbone_config={
            "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
            "layer_type": "basic", "out_features": ["stage4"],
        },
    ),
    entry(
        "yolos", "YolosForObjectDetection", pictures, wrap=Detector, num_detection_tokens=4, num_labels=CLASSES,
        use_mid_position_embeddings=False, **{**VISION, "image_size": [PIXELS, PIXELS]},
    ),
    entry(
        "sam", "SamModel", lambda: {"pixel_values": images(32), "points": torch.rand(8, 1, 1, 2) * 32}, wrap=Masks,
        vision_config={
            "hidden_size": 16, "output_channels": 16, "num_hidden_layers": 4, "num_attention_heads": 2,
            "image_size": 32, "patch_size": 8, "window_size": 2, "global_attn_indexes": [1, 3], "num_pos_feats": 8,
            "mlp_dim": 32,
        },
        prompt_encoder_config={
            "hidden_size": 16, "image_size": 32, "patch_size": 8, "image_embedding_size": 4, "mask_input_channels": 4,
        },
        mask_decoder_config={"hidden_size": 16, "num_attention_heads": 2, "mlp_dim": 32, "iou_head_hidden_dim": 16},
    ),
    # -- sound
    entry(
        "whisper", "WhisperForConditionalGeneration", spectrograms, num_mel_bins=8, max_source_positions=24,
        max_target_positions=16, **SEQ2SEQ,
    ),
    entry(
        "whisper, dropout", "WhisperForConditionalGeneration", spectrograms, drops=True, by_nature=Nature.DRAWS,
        num_mel_bins=8, max_source_positions=24, max_target_positions=16, **{**SEQ2SEQ, "dropout": 0.1},
    ),
    entry(
        "speech to text", "Speech2TextForConditionalGeneration",
        lambda: {"input_features": torch.randn(8, 48, 8), "labels": tokens(6)}, input_feat_per_channel=8,
        conv_channels=16, max_source_positions=48, max_target_positions=16, **SEQ2SEQ,
    ),
    entry("wav2vec 2", "Wav2Vec2ForCTC", speech, **SPEECH),
    entry(
        "wav2vec 2, classes", "Wav2Vec2ForSequenceClassification",
        lambda: {"input_values": torch.randn(8, 400), "labels": classes()}, num_labels=CLASSES, classifier_proj_size=16,
        **SPEECH,
    ),
    entry("hubert", "HubertForCTC", speech, **SPEECH),
    entry("data2vec audio", "Data2VecAudioForCTC", speech, **SPEECH),
    entry("wavlm", "WavLMForCTC", speech, num_buckets=16, max_bucket_distance=16, **SPEECH),
    entry("sew", "SEWForCTC", speech, squeeze_factor=2, **SPEECH),
    entry(
        "audio spectrogram", "ASTForAudioClassification",
        lambda: {"input_values": torch.randn(8, 24, 16), "labels": classes()}, max_length=24, num_mel_bins=16,
        frequency_stride=4, time_stride=4, num_labels=CLASSES,
        **{key: value for key, value in VISION.items() if key != "image_size"},
    ),
    # -- several kinds
    entry(
        "clip", "CLIPModel", captions, wrap=Contrastive, by_nature=Nature.SAMPLES, text_config=TEXT_PART,
        vision_config=VISION_PART, projection_dim=16,
    ),
    entry(
        "clip, pairs", "CLIPModel", captions, wrap=Matching, text_config=TEXT_PART, vision_config=VISION_PART,
        projection_dim=16,
    ),
    entry(
        "siglip", "SiglipModel", captions, wrap=Contrastive, by_nature=Nature.SAMPLES, text_config=TEXT_PART,
        vision_config=VISION_PART,
    ),
    entry(
        "blip", "BlipForConditionalGeneration", lambda: {**captions(), "labels": tokens(6)},
        text_config={**TEXT_PART, "encoder_hidden_size": 32}, vision_config=VISION_PART, projection_dim=16,
    ),
    entry("git", "GitForCausalLM", lambda: {**captions(), "labels": tokens(6)}, vision_config=VISION_PART, **WIDE),
    entry(
        "vilt", "ViltForQuestionAnswering", lambda: {**captions(), "labels": classes()}, wrap=RecorderOptions,
        num_labels=CLASSES, by_nature=Nature.DRAWS, **{**WIDE, **VISION},
    ),
    entry(
        "llava", "LlavaForConditionalGeneration", chats, image_token_index=3, image_token_id=3, vision_feature_layer=-1,
        text_config={"model_type": "llama", **WIDE}, vision_config={"model_type": "clip_vision_model", **VISION_PART},
    ),
    entry(
        "layoutlm v3", "LayoutLMv3ForTokenClassification",
        lambda: {
            "input_ids": tokens(), "bbox": torch.zeros(8, LENGTH, 4, dtype=torch.long), "pixel_values": images(PIXELS),
            "labels": torch.randint(0, CLASSES, (8, LENGTH)),
        },
        coordinate_size=4, shape_size=8, input_size=PIXELS, num_labels=CLASSES,
        **{**WIDE, "patch_size": 4, "hidden_size": 32},
    ),
    entry(
        "perceiver", "PerceiverForMaskedLM", lambda: {"inputs": (ids := tokens()), "labels": ids},
        vocab_size=VOCABULARY, d_model=32, d_latents=32, num_latents=8, num_blocks=1, num_self_attends_per_block=4,
        num_self_attention_heads=4, num_cross_attention_heads=4, qk_channels=32, v_channels=32,
        max_position_embeddings=LENGTH,
    ),
    entry(
        "decision transformer", "DecisionTransformerModel",
        lambda: {
            "inputs": {
                "states": torch.randn(8, 4, 3), "actions": torch.randn(8, 4, 2), "rewards": torch.randn(8, 4, 1),
                "returns_to_go": torch.randn(8, 4, 1), "timesteps": torch.arange(4).expand(8, 4),
                "attention_mask": torch.ones(8, 4, dtype=torch.long),
            },
            "target": torch.randn(8, 12, 32),
        },
        wrap=PooledTokens, state_dim=3, act_dim=2, hidden_size=32, n_layer=4, n_head=4, n_positions=64, max_ep_len=16,
        vocab_size=1,
    ),
    entry(
        "patchtst", "PatchTSTForPrediction",
        lambda: {"past_values": torch.randn(8, 24, 2), "future_values": torch.randn(8, 4, 2)}, num_input_channels=2,
        context_length=24, patch_length=4, patch_stride=4, prediction_length=4, d_model=32, num_hidden_layers=4,
        num_attention_heads=4, ffn_dim=64, norm_type="layernorm", loss="mse",
    ),
)  # fmt: skip
