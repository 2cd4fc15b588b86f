import lightning as L
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import PipelineStrategy


class Classifier(L.LightningModule):  # nothing in it knows of stages
    def __init__(self):
        super().__init__()
        blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(4)]
        self.layers = torch.nn.Sequential(*blocks, torch.nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = cross_entropy(self.layers(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


L.seed_everything(1)
x = torch.randn(4096, 64)
loader = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=128, shuffle=True)
trainer = L.Trainer(max_steps=50, devices=2, accelerator="cpu", strategy=PipelineStrategy())
trainer.fit(Classifier(), loader)
