"""Modules written by hand."""

from __future__ import annotations

import torch
from torch import nn

from tests.zoo.entry import Entry, Nature
from tests.zoo.modules import CLASSES, Classifier, classes, images


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2 = nn.Linear(16 * 4 * 4, 32), nn.Linear(32, CLASSES)

    def forward(self, x):
        x = torch.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = torch.max_pool2d(torch.relu(self.conv2(x)), 2)
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


def mlp(*between: type -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), *between, nn.Tanh()) for _ in range(4)), nn.Linear(16, CLASSES))


def rows():
    return torch.randn(8, 16), classes()


ENTRIES = (
    Entry("plain attributes", "by hand", lambda: Classifier(LeNet()), lambda: (images(28, 1), classes())),
    Entry("sequential", "by hand", lambda: Classifier(mlp()), rows),
    Entry("batch norm", "by hand", lambda: Classifier(mlp(nn.BatchNorm1d(16))), rows, by_nature=Nature.STATISTICS),
    Entry("dropout", "by hand", lambda: Classifier(mlp(nn.Dropout(0.2))), rows, by_nature=Nature.DRAWS),
)
