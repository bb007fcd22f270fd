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


def step_faults(
    optimization: Optimization, network: nn.Module, optimizer: Optimizer, *, key: str, has_closure: bool = True
) -> Iterator[Fault]:
    """The fault of an optimizer that no run can step, or whose weights are not those that it is evaluated with.

    optimizer: as it was made for these parameters of the network. key: of its node. has_closure: whether the run gives
        it the closure that runs forward and backward; phases have their gradients by then.
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
        shape = [2] * next(one.dim() for one in trained if (id(one) in sparse) == is_sparse)
        gradient = _sparse(shape) if is_sparse else torch.ones(shape)
        trouble = _trouble(optimization.optimizer_factory, gradient, has_closure=has_closure)
        if trouble is not None:
            gradients = "sparse gradients, of layers with sparse=true" if is_sparse else "gradients"
            yield Fault(
                key=place,
                got=f"{kind.__name__}, which refused a step by this network's {gradients} ({trouble})",
                expected="an optimizer that steps by the gradients of one forward and one backward",
                cure="Write sparse=false at the layer, or optimizer=sgd" if is_sparse else "Such as optimizer=adamw",
            )
            return


def _sparse(shape: list[int]) -> Tensor:
    with torch.sparse.check_sparse_tensor_invariants():  # torch 2.11 warns unless it is told
        return torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(shape), shape)


def _trouble(factory: functools.partial[Optimizer], gradient: Tensor, *, has_closure: bool) -> str | None:
    """What an optimizer says of a step by this gradient; or that it takes one that is none of the step's."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own of sparse tensors, which the run will tell
            if not has_closure:
                _stepped(factory, gradient, before=gradient, has_closure=False)
                return None
            # The run's closure clears what the last step has left: the step may not depend on it.
            one, other = (_stepped(factory, gradient, before=times * gradient, has_closure=True) for times in (1, 3))
    except REFUSALS as error:
        return f"{type(error).__name__}: {said(error)}"
    if torch.allclose(one, other, rtol=0, atol=0, equal_nan=True):
        return None
    return "it looks at gradients before it calls for them, which are those of the step before"


def _stepped(factory: functools.partial[Optimizer], gradient: Tensor, *, before: Tensor, has_closure: bool) -> Tensor:
    """The weights behind one step. before: the gradient that lies there when it begins."""
    weight = nn.Parameter(torch.ones(gradient.shape))
    weight.grad = before.clone()

    def closure() -> float:
        weight.grad = gradient.clone()
        return float(weight.sum())

    options = {**factory.keywords, "fused": None} if "fused" in factory.keywords else factory.keywords
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # for those that add noise
        optimizer = factory.func([weight], *factory.args, **options)
        if has_closure:
            optimizer.step(closure=closure)  # as Lightning calls it
        else:
            optimizer.step()
    return weight.detach()
