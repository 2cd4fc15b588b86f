"""Models of torchvision and timm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.efficientnet import MBConvConfig
from torchvision.models.mobilenetv3 import InvertedResidualConfig
from torchvision.models.regnet import BlockParams
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.models.segmentation.deeplabv3 import DeepLabHead, DeepLabV3
from torchvision.models.segmentation.fcn import FCN, FCNHead
from torchvision.models.segmentation.lraspp import LRASPP
from torchvision.models.vgg import make_layers

from tools.zoo.entry import Entry, Nature
from tools.zoo.modules import CLASSES, Classifier, Segmenter, Trained, classes, images

STATISTICS, DRAWS = Nature.STATISTICS, Nature.DRAWS
VIT: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 4}
MIXER: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_blocks": 4}


class WithAuxiliary(Classifier):
    """GoogLeNet: two more heads in the middle."""

    def loss(self, batch: Any) -> Tensor:
        inputs, labels = batch
        losses = [F.cross_entropy(head, labels) for head in self.model(inputs)]
        return losses[0] + 0.3 * sum(losses[1:])


class EvalNorm(Classifier):
    """BatchNorm with the statistics that it has, as in fine-tuning."""

    def on_train_epoch_start(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()


class FrozenBackbone(EvalNorm):
    """Only the head learns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.requires_grad_(False))
        model.get_submodule("fc").requires_grad_(True)


def tv(
    name: str,
    make: Callable[[], nn.Module],
    by_nature: Nature | None = None,
    *,
    size: int = 32,
    wrap: Callable[[nn.Module], Trained] = Classifier,
    layers: int = 4,
    source: str = "torchvision",
) -> Entry:
    """A classifier of images of a size."""
    return Entry(name, source, lambda: wrap(make()), lambda: (images(size), classes()), layers, by_nature)


def segmentation(name: str, make: Callable[[], nn.Module]) -> Entry:
    def batch() -> tuple[Tensor, Tensor]:
        return images(32), torch.randint(0, CLASSES, (8, 32, 32))

    return Entry(name, "torchvision", lambda: Segmenter(make()), batch, by_nature=STATISTICS)


def tm(name: str, model: str, by_nature: Nature | None = None, *, size: int = 32, **settings: Any) -> Entry:
    """A classifier that `timm.create_model` makes."""
    make = partial(timm.create_model, model, num_classes=CLASSES, **settings)
    return tv(name, make, by_nature, size=size, source="timm")


def timm_class(name: str, kind: Callable[..., nn.Module], by_nature: Nature | None = None, **settings: Any) -> Entry:
    """One that `timm.create_model` makes in its published size only."""
    return tv(name, partial(kind, num_classes=CLASSES, **settings), by_nature, source="timm")


def resnet(**settings: Any) -> ResNet:
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES, **settings)


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


def mobilenet_v3() -> nn.Module:
    block = partial(InvertedResidualConfig, dilation=1, width_mult=1.0)
    settings = [
        block(16, 3, 16, 16, True, "RE", 2), block(16, 3, 32, 24, False, "RE", 2), block(24, 5, 48, 24, True, "HS", 1),
        block(24, 5, 48, 32, True, "HS", 2),
    ]  # fmt: skip
    return models.MobileNetV3(settings, last_channel=32, num_classes=CLASSES, dropout=0.0)


def efficientnet(stochastic_depth: float = 0.0) -> nn.Module:
    block = partial(MBConvConfig, kernel=3, num_layers=1)
    settings = [
        block(1, stride=1, input_channels=16, out_channels=8), block(4, stride=2, input_channels=8, out_channels=12),
        block(4, stride=2, input_channels=12, out_channels=16, num_layers=2),
    ]  # fmt: skip
    return models.EfficientNet(settings, 0.0, stochastic_depth, num_classes=CLASSES, last_channel=32)


def regnet() -> nn.Module:
    blocks = BlockParams([1, 1, 2, 1], [8, 16, 16, 24], [8, 8, 8, 8], [1.0] * 4, [2] * 4, se_ratio=0.25)
    return models.RegNet(blocks, num_classes=CLASSES, stem_width=8)


def convnext(stochastic_depth: float = 0.0) -> nn.Module:
    settings = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, 24, 1), CNBlockConfig(24, None, 2)]
    return models.ConvNeXt(settings, stochastic_depth_prob=stochastic_depth, layer_scale=0.1, num_classes=CLASSES)


def swin(stochastic_depth: float = 0.0) -> nn.Module:
    shape = {"patch_size": [2, 2], "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": [4, 4]}
    return models.SwinTransformer(**shape, stochastic_depth_prob=stochastic_depth, num_classes=CLASSES)


def vit(dropout: float = 0.0) -> nn.Module:
    return models.VisionTransformer(16, 4, 4, 4, 32, 64, dropout=dropout, num_classes=CLASSES)


def maxvit() -> nn.Module:
    return models.MaxVit((32, 32), 8, 4, [8, 16], [1, 1], 8, stochastic_depth_prob=0.0, num_classes=CLASSES)


def vgg(*last: nn.Module) -> nn.Module:
    """VGG's layers, with a small head: the head of `VGG` itself has 100 million weights."""
    layers = make_layers([8, "M", 16, "M", 24, "M", 32, "M"])
    return nn.Sequential(layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *last, nn.Linear(32, CLASSES))


class Backbone(nn.Module):
    """Two resolutions, for segmentation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        low = self.first(x)
        high = self.second(low)
        return {"low": low, "high": high, "out": high}


ENTRIES = (
    # -- torchvision
    tv("resnet", resnet, STATISTICS),
    tv(
        "resnet, bottleneck", lambda: ResNet(Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, width_per_group=8),
        STATISTICS,
    ),
    tv("resnet, group norm", partial(resnet, norm_layer=group_norm)),
    tv("resnet, batch norm in eval mode", resnet, wrap=EvalNorm),
    tv("resnet, frozen backbone", resnet, wrap=FrozenBackbone),
    tv("vgg", vgg),
    tv("vgg, dropout", lambda: vgg(nn.Dropout(0.2)), DRAWS),
    tv("squeezenet", lambda: models.SqueezeNet("1_1", CLASSES, dropout=0.0)),
    tv("densenet", lambda: models.DenseNet(4, (2, 2, 2), 8, num_classes=CLASSES), STATISTICS),
    tv(
        "densenet, batch norm in eval mode", lambda: models.DenseNet(4, (2, 2, 2), 8, num_classes=CLASSES),
        wrap=EvalNorm,
    ),
    tv(
        "mobilenet v2",
        lambda: models.MobileNetV2(
            CLASSES, 0.25, dropout=0.0, inverted_residual_setting=[[1, 16, 1, 1], [4, 24, 2, 2], [4, 32, 1, 2]],
        ),
        STATISTICS,
    ),
    tv(
        "mobilenet v2, batch norm in eval mode",
        lambda: models.MobileNetV2(
            CLASSES, 0.25, dropout=0.0, inverted_residual_setting=[[1, 16, 1, 1], [4, 24, 2, 2], [4, 32, 1, 2]],
        ),
        wrap=EvalNorm,
    ),
    tv("mobilenet v3", mobilenet_v3, STATISTICS),
    tv("mnasnet", lambda: models.MNASNet(0.25, CLASSES, dropout=0.0), STATISTICS, size=64),
    tv("efficientnet", efficientnet, STATISTICS),
    tv("efficientnet, batch norm in eval mode", efficientnet, wrap=EvalNorm),
    tv("efficientnet, stochastic depth, in eval mode", partial(efficientnet, 0.3), DRAWS, wrap=EvalNorm),
    tv("shufflenet", lambda: models.ShuffleNetV2([2, 2, 2], [8, 16, 24, 32, 48], num_classes=CLASSES), STATISTICS),
    tv("regnet", regnet, STATISTICS),
    tv("regnet, batch norm in eval mode", regnet, wrap=EvalNorm),
    tv(
        "googlenet, auxiliary heads, in eval mode",
        lambda: models.GoogLeNet(CLASSES, init_weights=False, dropout=0.0, dropout_aux=0.0),
        wrap=type("AuxiliaryInEvalMode", (WithAuxiliary, EvalNorm), {}),
    ),
    tv("convnext of torchvision", convnext),
    tv("convnext, stochastic depth", partial(convnext, 0.3), DRAWS),
    tv("swin of torchvision", swin),
    tv("swin, stochastic depth", partial(swin, 0.3), DRAWS),
    tv("vit of torchvision", vit, size=16),
    tv("vit of torchvision, dropout", partial(vit, 0.2), DRAWS, size=16),
    tv("maxvit", maxvit, STATISTICS),
    segmentation("fcn", lambda: FCN(Backbone(), FCNHead(16, CLASSES))),
    segmentation("deeplab v3", lambda: DeepLabV3(Backbone(), DeepLabHead(16, CLASSES, (2, 4)))),
    segmentation("lraspp", lambda: LRASPP(Backbone(), 8, 16, CLASSES, 16)),
    # -- timm
    tm("timm vit", "vit_tiny_patch16_224", size=16, **VIT),
    tm("timm vit, dropped paths", "vit_tiny_patch16_224", DRAWS, size=16, drop_path_rate=0.2, **VIT),
    tm("timm deit", "deit_tiny_distilled_patch16_224", size=16, **VIT),
    tm("timm beit", "beit_base_patch16_224", size=16, **VIT),
    tm("timm eva 02", "eva02_tiny_patch14_224", size=16, **VIT),
    tm("timm cait", "cait_xxs24_224", size=16, depth_token_only=1, **{**VIT, "depth": 3}),
    tm(
        "timm swin", "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=8, depths=(2, 2),
        num_heads=(2, 2), drop_path_rate=0.0,
    ),
    tm("timm convnext", "convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)),
    tm("timm xcit", "xcit_nano_12_p16_224", STATISTICS, img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=4),
    tm(
        "timm pit", "pit_ti_224", img_size=32, patch_size=8, stride=4, base_dims=[8, 8, 8], depth=[1, 1, 1],
        heads=[2, 2, 2],
    ),
    tm("timm edgenext", "edgenext_xx_small", size=64, dims=(8, 16, 16, 24), depths=(1, 1, 1, 1)),
    tm("timm resnet-t", "resnet10t", STATISTICS, channels=(8, 16, 16, 24), stem_width=8),
    tm(
        "timm twins", "twins_svt_small", size=64, img_size=64, embed_dims=(8, 16, 16, 32), num_heads=(1, 2, 2, 2),
        depths=(1, 1, 2, 1), wss=(4, 4, 4, 2),
    ),
    tm(
        "timm davit", "davit_tiny", depths=(1, 1, 1, 1), embed_dims=(8, 16, 16, 32), num_heads=(2, 2, 2, 2),
        window_size=4,
    ),
    tm("timm coat", "coat_lite_tiny", size=64, img_size=64, embed_dims=(8, 16, 16, 24), serial_depths=(1, 1, 1, 1)),
    tm("timm tinynet", "tinynet_e", STATISTICS),
    timm_class("timm mixer", timm.models.MlpMixer, **MIXER),
    timm_class("timm convmixer", timm.models.ConvMixer, STATISTICS, dim=16, depth=4, kernel_size=3, patch_size=4),
    timm_class("timm metaformer", timm.models.MetaFormer, depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)),
    timm_class(
        "timm nest", timm.models.Nest, img_size=32, num_levels=2, embed_dims=(16, 32), num_heads=(2, 4), depths=(2, 2),
        drop_path_rate=0.0,
    ),
    timm_class("timm focalnet", timm.models.FocalNet, embed_dim=8, depths=(1, 1, 1, 1), drop_path_rate=0.0),
    timm_class(
        "timm tnt", timm.models.TNT, img_size=32, embed_dim=32, inner_dim=8, depth=4, num_heads_inner=2,
        num_heads_outer=4,
    ),
    timm_class(
        "timm volo", timm.models.VOLO, DRAWS, img_size=32, layers=(1, 1, 1, 1), embed_dims=(16, 32, 32, 32),
        num_heads=(2, 2, 2, 2), patch_size=8,
    ),
)  # fmt: skip
