"""lightning-bolts: its modules that need no data of their own."""

from __future__ import annotations

from typing import Any

from pl_bolts.models.autoencoders import AE, VAE
from pl_bolts.models.gans import DCGAN, GAN
from pl_bolts.models.mnist_module import LitMNIST
from pl_bolts.models.regression import LinearRegression, LogisticRegression

from tests.others.data import classes, normal, rows
from tests.others.entry import Entry


def entry(name: str, make: Any, loader: Any) -> Entry:
    return Entry(name, "lightning-bolts", make, loader, validates=False)


def image(channels: int, size: int) -> Any:
    return lambda batch_size: rows(batch_size, normal(channels, size, size), classes(10))


ENTRIES = (
    entry("autoencoder", lambda: AE(input_height=32, enc_out_dim=512, latent_dim=8), image(3, 32)),
    entry("vae", lambda: VAE(input_height=32, enc_out_dim=512, latent_dim=8), image(3, 32)),
    entry("mnist", LitMNIST, image(1, 28)),
    entry("linear regression", lambda: LinearRegression(4), lambda size: rows(size, normal(4), normal(1))),
    entry("logistic regression", lambda: LogisticRegression(4, 3), lambda size: rows(size, normal(4), classes(3))),
    entry("gan", lambda: GAN(1, 28, 28), image(1, 28)),
    entry("dcgan", lambda: DCGAN(feature_maps_gen=4, feature_maps_disc=4, image_channels=1), image(1, 64)),
)
