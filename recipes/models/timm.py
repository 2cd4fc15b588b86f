"""A classifier of images from timm, unmodified: from its name, a file of weights or a folder; and a folder of it."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from recipes.data.images import ImageData
from recipes.models.classifier import Classifier


class TimmClassifier(Classifier):
    """Trains a model of timm: a new one, or one whose weights are in a file or a folder. Where those are for another
    number of classes, the output layer begins anew. conf/model/timm.yaml says what the settings mean.

    Raises:
        ModuleNotFoundError: timm isn't installed.
        ValueError: timm doesn't know the architecture or an argument, or the weights are those of another model.
    """

    def __init__(
        self,
        *,
        optimizer: Mapping[str, Any],
        scheduler: Mapping[str, Any] | None = None,
        classes: int,
        architecture: str | None = None,
        pretrained: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(created(architecture, pretrained, classes, arguments or {}), classes, optimizer, scheduler)
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Look at the data before the first batch. ValueError: the model takes images of another size."""
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, ImageData):
            return
        net: Any = self.net
        patches = getattr(net, "patch_embed", None)
        takes = getattr(patches, "img_size", None) if getattr(patches, "strict_img_size", False) else None
        if takes is not None and tuple(takes) != (data.size, data.size):
            raise ValueError(
                f"data.size={data.size}: the model takes images of {takes[0]} x {takes[1]}: use data.size={takes[0]}, "
                f"or model.arguments.img_size={data.size}."
            )
        source = self.hparams["pretrained"]
        if source is None or not Path(source).is_dir():
            return  # it isn't known how the images were normalised from which it has learned
        for name, value in (("mean", data.mean), ("std", data.std)):
            known = tuple(net.pretrained_cfg[name])
            if known != value:
                rank_zero_warn(f"data.{name}={list(value)}, but {source} has learned with {list(known)}.")


def created(architecture: str | None, pretrained: str | None, classes: int, arguments: Mapping[str, Any]) -> nn.Module:
    """What ``timm.create_model`` makes, in training's mode. Weights are read by their names, and all have to be there.
    The arguments are those of :class:`TimmClassifier`.

    Raises:
        ValueError: timm can't make it, or the weights are those of another model.
    """
    import timm
    from safetensors import SafetensorError

    if architecture is not None and not timm.is_model(architecture):
        near = difflib.get_close_matches(architecture, timm.list_models(), n=1)
        fix = f"did you mean {near[0]}?" if near else "timm.list_models() has the names"
        raise ValueError(f"model.architecture={architecture}: timm has no such model; {fix}")
    given = {"pretrained": pretrained is not None, **arguments}
    if pretrained is None:
        name, given["num_classes"] = str(architecture), classes
    elif Path(pretrained).is_dir():
        name = f"local-dir:{pretrained}"
    try:
        if pretrained is not None and not Path(pretrained).is_dir():
            name, stored = str(architecture), _classes_in(Path(pretrained), str(architecture))
            overlay = {"file": pretrained, "num_classes": stored, "custom_load": False, "label_offset": 0}
            given |= {"pretrained_cfg_overlay": overlay, "num_classes": stored}
        net: Any = timm.create_model(name, **given)
    except (OSError, ValueError, KeyError, TypeError, AssertionError, RuntimeError, SafetensorError) as error:
        what = f"architecture={architecture}" if pretrained is None else f"pretrained={pretrained}"
        said = textwrap.shorten(str(error), 300)
        raise ValueError(f"model.{what}: timm can't make it with model.arguments={dict(arguments)}: {said}") from error
    known = (net.pretrained_cfg or {}).get("architecture")
    if pretrained is not None and architecture is not None and known != architecture.split(".")[0]:
        raise ValueError(f"model.architecture={architecture}: {pretrained} has a {known}; leave the architecture out")
    if net.num_classes != classes:
        net.reset_classifier(classes)
    whole: nn.Module = net
    return whole


def _classes_in(file: Path, architecture: str) -> int:
    """How many a file of safetensors is for; 0 where it has no output layer."""
    import timm
    from safetensors import safe_open

    known = timm.get_pretrained_cfg(architecture)
    layer = known.classifier if known is not None else None
    first = layer if isinstance(layer, str) or layer is None else layer[0]
    with safe_open(file, "pt") as weights:
        name = f"{first}.weight"
        return int(weights.get_slice(name).get_shape()[0]) if name in weights.keys() else 0  # noqa: SIM118


def save(net: nn.Module, folder: Path, data: Mapping[str, Any], labels: Sequence[str] | None) -> None:
    """Write a folder that ``timm.create_model("local-dir:FOLDER", pretrained=True)`` opens, with the config of the
    images on which the net was trained and the names of its classes, where they are known."""
    from timm.models import save_for_hf

    known: dict[str, Any] = {}
    if data.get("name") == "images":
        size = data["size"]
        known = {"input_size": (3, size, size), "mean": data["mean"], "std": data["std"]}
        known |= {"interpolation": "bicubic", "crop_pct": 1.0, "crop_mode": "center"}
    about = {} if labels is None else {"label_names": list(labels)}
    save_for_hf(net, str(folder), model_config=about, safe_serialization=True, data_config=known or None)
