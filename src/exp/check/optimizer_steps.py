"""Make one step of each optimizer, apart from the network: may it step by gradients alone, of the kind that there are?

Judged by what it does, on two small weights of its own: not by its name.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from exp.errors import REFUSALS, Fault, said
from exp.optim.optimizer import Optimization, sparse_parameters


def step_faults(optimization: Optimization, network: nn.Module, optimizer: Optimizer, *, key: str) -> Iterator[Fault]:
    """The fault of an optimizer that no run can step, or whose weights are not those that it is evaluated with.

    optimizer: as it was made for these parameters of the network. key: of its node.
    """
    kind, place = type(optimizer), f"{key}._target_"
    # The protocol of schedule-free optimizers: train() and eval() exchange the weights.
    if all(callable(getattr(kind, word, None)) for word in ("train", "eval")):
        yield Fault(
            key=place,
            got=f"{kind.__name__}, which keeps two sets of weights and wants to be told train() and eval()",
            expected="an optimizer that trains the weights that are validated and saved",
            cure="optimizer=adamw with callbacks=[ema] validates and saves an average, too",
        )
        return
    if isinstance(optimizer, LBFGS):
        return  # which is given the closure that it evaluates again
    sparse = sparse_parameters(network)
    trained = [one for group in optimizer.param_groups for one in group["params"]]
    kinds = {id(one) in sparse for one in trained}
    for is_sparse in sorted(kinds):
        trouble = _trouble(optimization.optimizer_factory, trained, sparse=sparse, is_sparse=is_sparse)
        if trouble is not None:
            gradients = "sparse gradients, of layers with sparse=true" if is_sparse else "gradients"
            yield Fault(
                key=place,
                got=f"{kind.__name__}, which refused a step by this network's {gradients} ({trouble})",
                expected="an optimizer that steps by the gradients of one forward and one backward",
                cure="Write sparse=false at the layer, or optimizer=sgd" if is_sparse else "Such as optimizer=adamw",
            )
            return


def _trouble(
    factory: functools.partial[Optimizer], trained: list[Tensor], *, sparse: set[int], is_sparse: bool
) -> str | None:
    """What an optimizer says of a step by a gradient of this kind, for weights of a shape that the network has."""
    shape = next(one.dim() for one in trained if (id(one) in sparse) == is_sparse)
    weight = nn.Parameter(torch.ones([2] * shape))
    weight.grad = torch.ones_like(weight)
    if is_sparse:
        rows = torch.tensor([[0, 1]])
        weight.grad = torch.sparse_coo_tensor(rows, weight.detach(), weight.shape, check_invariants=True)
    options = {**factory.keywords, "fused": None} if "fused" in factory.keywords else factory.keywords
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own of sparse tensors, which the run will tell
            factory.func([weight], *factory.args, **options).step()
    except REFUSALS as error:
        return f"{type(error).__name__}: {said(error)}"
    return None
