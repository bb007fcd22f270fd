"""Data set, layer and hook of a user, in a file next to ./conf."""

import torch
from exp.hooks.hook import Hook
from torch.utils.data import Dataset


class Spirals(Dataset):
    def __init__(self, *, samples: int, noise: float) -> None:
        generator = torch.Generator().manual_seed(1)
        radius = torch.rand(samples, generator=generator).sqrt()
        label = torch.arange(samples) % 2
        angle = radius * 7 + label * torch.pi
        self.points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
        self.points += noise * torch.randn(self.points.shape, generator=generator)
        self.labels = label

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.points[index], self.labels[index]


class Sine(torch.nn.Module):
    def __init__(self, *, features: int, frequency: float = 3.0) -> None:
        super().__init__()
        self.frequency = torch.nn.Parameter(torch.full((features,), frequency))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.frequency * x)


class WeightNorm(Hook):
    def after_step(self, step):
        return {"weights/norm": torch.cat([p.detach().flatten() for p in step.network.parameters()]).norm()}
