"""A classifier of images from timm, unmodified."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from recipes.data.images import ImageData
from recipes.models.classifier import Classifier
from recipes.models.timm_folder import created


class TimmClassifier(Classifier):
    """Trains a model of timm: a new one, or one whose weights are in a file or a folder.

    Args:
        architecture: a name of ``timm.list_models()``. None takes the one that the folder ``pretrained`` names.
        classes: labels. Where ``pretrained`` has another number, the output layer begins anew.
        pretrained: a ``.safetensors`` file of weights as timm names them, or a folder as timm's ``save_for_hf`` writes
            it, with ``config.json``. None begins a new model.
        arguments: of ``timm.create_model``, as ``img_size``.
        optimizer, scheduler: see :func:`recipes.models.optimizer.configure`.

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
        """Look at the data before the first batch.

        Raises:
            ValueError: the model takes images of another size.
        """
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
