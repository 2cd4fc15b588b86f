import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import lightning_parallel  # noqa: F401 (makes the names known to Lightning)


class Classifier(L.LightningModule):
    def __init__(self, width: int = 64):
        super().__init__()
        blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(4)]
        self.layers = torch.nn.Sequential(torch.nn.Linear(width, 64), *blocks, torch.nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return cross_entropy(self.layers(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.001)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=128, shuffle=True)


if __name__ == "__main__":
    LightningCLI(Classifier, Data)
