"""Models of several families by which plans are judged. Their steps take a tenth of a second to one on a core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.models.gpt import GPT

SAMPLES = 16  # of a batch
_CLASSES = 10
# Where the models of transformers are.
PRELOAD = tuple(
    f"transformers.models.{name}.modeling_{name}" for name in ("llama", "bert", "t5", "bart", "vit", "resnet")
)


@dataclass(frozen=True)
class Model:
    """``module`` makes one, ``batch`` a batch for it, of random numbers."""

    name: str
    family: str
    module: Callable[[], L.LightningModule]
    batch: Callable[[], Any]

    def build(self) -> tuple[L.LightningModule, Any]:
        """The same numbers in every process."""
        torch.manual_seed(0)
        return self.module(), self.batch()


class OfTransformers(L.LightningModule):
    """A model of transformers, which computes its loss itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Classifier(L.LightningModule):
    """Logits in the last dimension but for images, where they are in the second one."""

    def __init__(self, model: nn.Module, optimizer: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self._optimizer = model, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = batch
        logits = self.model(inputs)
        loss = F.cross_entropy(logits.transpose(1, -1) if logits.dim() == 3 else logits, labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return self._optimizer(self.parameters(), lr=1e-3)


_MOMENTUM = partial(torch.optim.SGD, momentum=0.9)


# -- families --------------------------------------------------------------------------------------------------------


def _gpt(**sizes: Any) -> L.LightningModule:
    return GPT(optimizer={"_target_": "torch.optim.AdamW", "lr": 1e-4}, heads=4, **sizes)


def _tokens(length: int, vocabulary: int, count: int = 2) -> tuple[Tensor, ...]:
    return torch.randint(4, vocabulary, (count, SAMPLES, length)).unbind()


def _named(length: int, vocabulary: int) -> dict[str, Tensor]:
    ids, labels = _tokens(length, vocabulary)
    return {"input_ids": ids, "labels": labels}


def _transformers(model: str, config: str, **settings: Any) -> L.LightningModule:
    import transformers  # here: it takes seconds

    return OfTransformers(getattr(transformers, model)(getattr(transformers, config)(**settings)))


_llama = partial(_transformers, "LlamaForCausalLM", "LlamaConfig", vocab_size=1024, num_attention_heads=4)
_bert = partial(_transformers, "BertForMaskedLM", "BertConfig", vocab_size=1024, num_attention_heads=4)
_t5 = partial(
    _transformers, "T5ForConditionalGeneration", "T5Config", vocab_size=1024, num_heads=4, decoder_start_token_id=0
)
_bart = partial(
    _transformers,
    "BartForConditionalGeneration",
    "BartConfig",
    vocab_size=1024,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
)


def _pictures(size: int, channels: int = 3) -> Tensor:
    return torch.randn(SAMPLES, channels, size, size)


def _classified(size: int) -> dict[str, Tensor]:
    return {"pixel_values": _pictures(size), "labels": torch.randint(0, _CLASSES, (SAMPLES,))}


_vit = partial(_transformers, "ViTForImageClassification", "ViTConfig", num_labels=_CLASSES, num_attention_heads=4)
_resnet = partial(_transformers, "ResNetForImageClassification", "ResNetConfig", num_labels=_CLASSES)


class _Twice(nn.Module):
    """Two convolutions, as in each half of a U-Net (arXiv:1505.04597)."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, outer) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norms[1](self.second(F.silu(self.norms[0](self.first(x))))))


class _UNet(nn.Module):
    """Images [samples, 3, size, size] -> logits of each pixel."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(_Twice(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(_Twice(a + b, a) for a, b in reversed([*zip(widths, widths[1:], strict=False)]))
        self.head = nn.Conv2d(width, _CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for number, block in enumerate(self.down):
            x = block(x if number == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        for block, beside in zip(self.up, reversed(kept[:-1]), strict=True):
            x = block(torch.cat((beside, F.interpolate(x, scale_factor=2.0)), dim=1))
        return self.head(x)


def _unet(width: int, depth: int) -> L.LightningModule:
    return Classifier(_UNet(width, depth), partial(torch.optim.AdamW))


def _segmented(size: int) -> tuple[Tensor, Tensor]:
    return _pictures(size), torch.randint(0, _CLASSES, (SAMPLES, size, size))


def _mlp(width: int, layers: int) -> L.LightningModule:
    hidden = (part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU()))
    return Classifier(nn.Sequential(*hidden, nn.Linear(width, _CLASSES)), _MOMENTUM)


def _vectors(width: int, samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, width), torch.randint(0, _CLASSES, (samples,))


class _LSTM(nn.Module):
    """Tokens [samples, length] -> logits of the next ones."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)


def _lstm(width: int, layers: int) -> L.LightningModule:
    return Classifier(_LSTM(width, layers, 256), torch.optim.Adam)


MODELS: Mapping[str, Model] = MappingProxyType(
    {
        model.name: model
        for model in (
            Model("gpt, 4 of 256", "gpt", partial(_gpt, layers=4, width=256, context=64), partial(_tokens, 64, 256)),
            Model("gpt, 12 of 128", "gpt", partial(_gpt, layers=12, width=128, context=64), partial(_tokens, 64, 256)),
            Model(
                "gpt, 6 of 192, tied",
                "gpt",
                partial(_gpt, layers=6, width=192, context=64, vocab_size=4096, tie_embeddings=True),
                partial(_tokens, 64, 4096),
            ),
            Model(
                "llama, 6 of 256",
                "llama",
                partial(_llama, hidden_size=256, intermediate_size=688, num_hidden_layers=6),
                partial(_named, 64, 1024),
            ),
            Model(
                "llama, 12 of 128",
                "llama",
                partial(_llama, hidden_size=128, intermediate_size=344, num_hidden_layers=12, num_key_value_heads=2),
                partial(_named, 64, 1024),
            ),
            Model(
                "bert, 4 of 256",
                "bert",
                partial(_bert, hidden_size=256, intermediate_size=1024, num_hidden_layers=4),
                partial(_named, 64, 1024),
            ),
            Model(
                "bert, 8 of 128",
                "bert",
                partial(_bert, hidden_size=128, intermediate_size=512, num_hidden_layers=8),
                partial(_named, 128, 1024),
            ),
            Model(
                "t5, 3 + 3 of 192",
                "encoder-decoder",
                partial(_t5, d_model=192, d_ff=768, d_kv=48, num_layers=3),
                partial(_named, 64, 1024),
            ),
            Model(
                "t5, 5 + 5 of 128",
                "encoder-decoder",
                partial(_t5, d_model=128, d_ff=512, d_kv=32, num_layers=5),
                partial(_named, 64, 1024),
            ),
            Model(
                "bart, 3 + 3 of 192",
                "encoder-decoder",
                partial(
                    _bart, d_model=192, encoder_layers=3, decoder_layers=3, encoder_ffn_dim=768, decoder_ffn_dim=768
                ),
                partial(_named, 64, 1024),
            ),
            Model(
                "vit, 6 of 192",
                "vit",
                partial(_vit, hidden_size=192, intermediate_size=768, num_hidden_layers=6, image_size=64, patch_size=8),
                partial(_classified, 64),
            ),
            Model(
                "vit, 8 of 128",
                "vit",
                partial(_vit, hidden_size=128, intermediate_size=512, num_hidden_layers=8, image_size=48, patch_size=4),
                partial(_classified, 48),
            ),
            Model(
                "resnet, basic",
                "resnet",
                partial(
                    _resnet, embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[2] * 4, layer_type="basic"
                ),
                partial(_classified, 128),
            ),
            Model(
                "resnet, bottleneck",
                "resnet",
                partial(_resnet, embedding_size=32, hidden_sizes=[64, 128, 256, 512], depths=[2, 3, 3, 2]),
                partial(_classified, 96),
            ),
            Model("u-net, 3 levels", "u-net", partial(_unet, 24, 3), partial(_segmented, 48)),
            Model("u-net, 2 levels", "u-net", partial(_unet, 32, 2), partial(_segmented, 32)),
            Model("mlp, 6 of 1024", "mlp", partial(_mlp, 1024, 6), partial(_vectors, 1024, 256)),
            Model("mlp, 16 of 512", "mlp", partial(_mlp, 512, 16), partial(_vectors, 512, 512)),
            Model("lstm, 4 of 256", "lstm", partial(_lstm, 256, 4), partial(_tokens, 64, 256)),
            Model("lstm, 8 of 128", "lstm", partial(_lstm, 128, 8), partial(_tokens, 64, 256)),
        )
    }
)
FAMILIES = tuple(dict.fromkeys(model.family for model in MODELS.values()))
