"""torch_geometric: its examples for PyTorch Lightning, on small random graphs."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GAT, GCN, GIN, MLP, GraphSAGE, global_add_pool, global_mean_pool
from torchmetrics import Accuracy

from tools.others.entry import SAMPLES, Entry

FEATURES, CLASSES = 6, 3


def graph(nodes: int, index: int) -> Data:
    edges = torch.stack([torch.arange(nodes), torch.arange(nodes).roll(1)])
    return Data(
        x=torch.randn(nodes, FEATURES), edge_index=torch.cat([edges, edges.flip(0)], 1), y=torch.tensor(index % CLASSES)
    )


def graphs(batch_size: int) -> Any:
    return DataLoader([graph(3 + index % 4, index) for index in range(SAMPLES)], batch_size)


class GraphClassifier(L.LightningModule):
    """examples/pytorch_lightning/gin.py"""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.gnn = GIN(FEATURES, 16, 3, dropout=dropout, jk="cat")
        self.classifier = MLP([16, 16, CLASSES], norm="batch_norm", dropout=dropout)
        self.train_acc = Accuracy(task="multiclass", num_classes=CLASSES)
        self.val_acc = Accuracy(task="multiclass", num_classes=CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = self.gnn(x, edge_index)
        x = global_add_pool(x, batch)
        return self.classifier(x)

    def training_step(self, data: Batch, batch_idx: int) -> Tensor:
        y_hat = self(data.x, data.edge_index, data.batch)
        loss = F.cross_entropy(y_hat, data.y)
        self.train_acc(y_hat.softmax(dim=-1), data.y)
        self.log("train_acc", self.train_acc, prog_bar=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, data: Batch, batch_idx: int) -> None:
        y_hat = self(data.x, data.edge_index, data.batch)
        self.val_acc(y_hat.softmax(dim=-1), data.y)
        self.log("val_acc", self.val_acc, prog_bar=True, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class GraphNet(GraphClassifier):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.gnn = kind(FEATURES, 16, 3)
        self.classifier = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return self.classifier(global_mean_pool(self.gnn(x, edge_index), batch))


class Nodes(L.LightningModule):
    """examples/pytorch_lightning/graph_sage.py: the loss of the first nodes of a sampled graph"""

    def __init__(self) -> None:
        super().__init__()
        self.gnn = GraphSAGE(FEATURES, 16, 2, CLASSES, dropout=0.5, norm=nn.BatchNorm1d(16))

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        y_hat = self.gnn(data.x, data.edge_index)[: data.batch_size]
        return F.cross_entropy(y_hat, data.labels[: data.batch_size])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def node_graphs(batch_size: int) -> Any:
    found = []
    for index in range(4):
        data = graph(20, index)
        data.labels, data.batch_size = torch.arange(20) % CLASSES, batch_size
        found.append(data)
    return torch.utils.data.DataLoader(found, batch_size=None)  # as NeighborLoader gives them, one after the other


ENTRIES = (
    Entry("graph classifier, gin", "torch-geometric", GraphClassifier, graphs),
    Entry("graph classifier, gcn", "torch-geometric", lambda: GraphNet(GCN), graphs),
    Entry("graph classifier, gat", "torch-geometric", lambda: GraphNet(GAT), graphs),
    Entry("node classifier, sage", "torch-geometric", Nodes, node_graphs, validates=False),
)
