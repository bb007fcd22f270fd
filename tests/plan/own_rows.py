"""Data set of a user; its parameters select an error in all samples, in sample 5 or in sample 70."""

import torch
from torch.utils.data import Dataset, IterableDataset

TARGETS = {
    "well": lambda index: index % 3,
    "beyond": lambda index: 7 if index == 5 else index % 3,
    "late": lambda index: 7 if index == 70 else index % 3,
    "negative": lambda index: -1 if index == 5 else index % 3,
    "ignored": lambda index: -100 if index == 5 else index % 3,
    "void": lambda index: 255 if index == 5 else index % 3,
    "float": lambda index: float(index % 3),
    "column": lambda index: torch.tensor([index % 3]),
    "one_hot": lambda index: torch.eye(3, dtype=torch.int64)[index % 3],
    "bool": lambda index: index % 2 == 0,
    "many": lambda index: torch.tensor([1, 0, index % 2]),
    "many_floats": lambda index: torch.tensor([1.0, 0.0, index % 2]),
    "answers": lambda index: torch.tensor([1.0, 0.0, 2.0 if index == 5 else 0.0]),
    "number": lambda index: 0.5,
    "missing": lambda index: torch.tensor([0.1, float("nan") if index == 5 else 0.2, 0.3]),
    "none": lambda index: None,
    "text": lambda index: "cat",
    "object": lambda index: object(),
    "uint8": lambda index: torch.tensor(index % 3, dtype=torch.uint8),
}


class Rows(Dataset):
    def __init__(self, *, target="well", input="well", samples=80, by="pair"):
        self.target, self.input, self.samples, self.by = target, input, samples, by

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        if self.by == "none":
            return None
        value = torch.ones(4) + index
        if self.input == "double":
            value = value.double()
        if self.input == "missing" and index == 5:
            value[1] = float("nan")
        if self.input == "wide" and index == 5:
            value = torch.ones(5)
        target = TARGETS[self.target](index)
        if self.by == "pair":
            return value, target
        if self.by == "alone":
            return value
        if self.by == "names":
            return {"image": value, "label": target}
        if self.by == "input":
            return {"input": value, "label": target}
        return {"input": value, "target": target}


class Stream(IterableDataset):
    def __init__(self, *, target="well"):
        self.target = target

    def __iter__(self):
        return iter((torch.ones(4), TARGETS[self.target](index)) for index in range(80))


class Gathered:
    def __init__(self, *, target="well"):
        self.targets = torch.stack([torch.as_tensor(TARGETS[target](index)) for index in range(80)])

    def __len__(self):
        return 80

    def gather(self, indices):
        return torch.ones(len(indices), 4), self.targets[indices]


class Twice:
    """Collate function that puts each sample into two rows of the batch."""

    def __call__(self, samples):
        inputs, targets = torch.utils.data.default_collate(samples)
        return inputs.repeat(2, 1), targets.repeat(2)
