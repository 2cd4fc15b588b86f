"""matgl: networks of graphs for crystals, with its own collate function."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from matgl.ext.pymatgen import Structure2Graph, get_element_list
from matgl.graph.data import MGLDataset, collate_fn_graph
from matgl.models import MEGNet
from matgl.utils.training import ModelLightningModule
from pymatgen.core import Lattice, Structure
from torch.utils.data import DataLoader

from tools.others.entry import SAMPLES, Entry


def crystals() -> list[Structure]:
    return [
        Structure(Lattice.cubic(3.5 + 0.02 * i), ["Na", "Cl"], [[0, 0, 0], [0.5, 0.5, 0.5]]) for i in range(SAMPLES)
    ]


def loader(batch_size: int) -> Any:
    structures = crystals()
    converter = Structure2Graph(element_types=get_element_list(structures), cutoff=4.0)
    labels = {"energy": numpy.linspace(-1, 1, SAMPLES).tolist()}
    data = MGLDataset(structures=structures, labels=labels, converter=converter, save_cache=False)
    return DataLoader(data, batch_size, collate_fn=collate_fn_graph)


def network() -> Any:
    elements = get_element_list(crystals())
    return ModelLightningModule(MEGNet(
        dim_node_embedding=8, dim_edge_embedding=16, dim_state_embedding=2, nblocks=2, hidden_layer_sizes_input=(16, 8),
        hidden_layer_sizes_conv=(16, 16, 8), nlayers_set2set=1, niters_set2set=2, hidden_layer_sizes_output=(8, 4),
        is_classification=False, element_types=elements, cutoff=4.0, bond_expansion=None,
    ))  # fmt: skip


ENTRIES = (Entry("megnet", "matgl", network, loader, dtype=torch.float32),)
