"""schnetpack: its potentials for molecules, as in its tutorials, with its data module."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy
import torch
import torch.utils.data.dataloader as loading
from ase.build import molecule

from tools.others.entry import SAMPLES, Entry
from tools.zoo.precision import everything_in

loading.T_co = loading._T_co  # type: ignore[attr-defined]  schnetpack imports it, torch has renamed it

import schnetpack.transform as transforms  # noqa: E402
import torchmetrics  # noqa: E402
from schnetpack import atomistic, model, nn, representation, task  # noqa: E402
from schnetpack.data import ASEAtomsData, AtomsDataModule, AtomsLoader  # noqa: E402

MOLECULES = ["H2O", "CH4", "NH3", "CH3OH"]
CUTOFF = 4.0


def data(batch_size: int) -> Any:
    """The data module, but without shuffling."""
    file = str(Path(tempfile.mkdtemp()) / "molecules.db")
    created = ASEAtomsData.create(file, distance_unit="Ang", property_unit_dict={"energy": "eV", "forces": "eV/Ang"})
    random = numpy.random.default_rng(0)
    atoms = [molecule(MOLECULES[index % len(MOLECULES)]) for index in range(SAMPLES + 8)]
    for one in atoms:
        one.positions += random.normal(scale=0.05, size=one.positions.shape)
    created.add_systems([{"energy": random.normal(size=1), "forces": random.normal(size=one.positions.shape)}
                         for one in atoms], atoms)  # fmt: skip
    found = AtomsDataModule(
        file, batch_size, num_train=SAMPLES, num_val=8, num_test=0, num_workers=0, split_file=None,
        transforms=[transforms.ASENeighborList(CUTOFF), transforms.RemoveOffsets("energy", remove_mean=True)],
    )  # fmt: skip
    found.setup()
    found._train_dataloader = AtomsLoader(found.train_dataset, batch_size)
    return found


def output(name: str, weight: float) -> Any:
    return task.ModelOutput(name, torch.nn.MSELoss(), weight, metrics={"MAE": torchmetrics.MeanAbsoluteError()})


def entry(name: str, kind: Any, forces: bool = False) -> Entry:
    def train(batch_size: int) -> None:
        with everything_in(torch.float32):  # what it takes here, the numbers then are float64
            basis = nn.GaussianRBF(n_rbf=8, cutoff=CUTOFF)
        network = kind(n_atom_basis=16, n_interactions=3, radial_basis=basis, cutoff_fn=nn.CosineCutoff(CUTOFF))
        potential = model.NeuralNetworkPotential(
            network,
            [atomistic.PairwiseDistances()],
            [atomistic.Atomwise(n_in=16, output_key="energy"), *([atomistic.Forces()] if forces else [])],
            [transforms.CastTo64(), transforms.AddOffsets("energy", add_mean=True)],
        )
        outputs = [output("energy", 0.01 if forces else 1.0), *([output("forces", 0.99)] if forces else [])]
        module = task.AtomisticTask(potential, outputs, torch.optim.AdamW, {"lr": 1e-3})
        L.Trainer(accelerator="cpu", logger=False).fit(module, datamodule=data(batch_size))

    return Entry(name, "schnetpack", trains=train)


ENTRIES = (
    entry("schnet", representation.SchNet),
    entry("schnet, forces", representation.SchNet, True),
    entry("painn", representation.PaiNN),
    entry("painn, forces", representation.PaiNN, True),
)
