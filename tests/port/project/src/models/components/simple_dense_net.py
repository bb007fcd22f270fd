from itertools import pairwise

import torch
from torch import nn


class SimpleDenseNet(nn.Module):
    """Three hidden layers with batch norm on flattened pictures."""

    def __init__(
        self,
        input_size: int = 784,
        lin1_size: int = 256,
        lin2_size: int = 256,
        lin3_size: int = 256,
        output_size: int = 10,
    ) -> None:
        super().__init__()
        sizes = [input_size, lin1_size, lin2_size, lin3_size]
        layers: list[nn.Module] = []
        for size, following in pairwise(sizes):
            layers += [nn.Linear(size, following), nn.BatchNorm1d(following), nn.ReLU()]
        self.model = nn.Sequential(*layers, nn.Linear(lin3_size, output_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch_size, _channels, _width, _height = x.size()
        return self.model(x.view(batch_size, -1))
