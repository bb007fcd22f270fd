"""Layers in parts by torch.distributed.tensor.parallel: a plan applied to a network, and compared with the whole one.

A layer keeps its class and its names. Its parameters are plain tensors of the local shard, which become DTensors only
within its forward: fused AdamW and `clip_grad_norm_` refuse lists of which only some parameters are DTensors.

The backward of a DTensor that changes its layout cannot be differentiated again (torch 2.13): of two cut layers the
second gradients had the norms 0.27 and 0.19 instead of 5.37 and 6.72, without an error. The compatibility table
therefore refuses losses that differentiate a gradient.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.func import functional_call

from exp.errors import RunError, one_line
from exp.models.containers import ProgramModel
from exp.models.inference import network_call
from exp.nested import tensors_in
from exp.strategies.tensor_plan import Plan, count_of

log = logging.getLogger(__name__)

# Dimension of the sequence in activations `[B, T, C]`.
SEQUENCE = 1
STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "column": ColwiseParallel,
    "column_whole": partial(ColwiseParallel, output_layouts=Replicate()),
    "column_of_sequence": partial(ColwiseParallel, input_layouts=Shard(SEQUENCE)),
    "row": RowwiseParallel,
    "row_to_sequence": partial(RowwiseParallel, output_layouts=Shard(SEQUENCE)),
    "vocabulary": partial(RowwiseParallel, input_layouts=Replicate()),
    "sequence": partial(SequenceParallel, sequence_dim=SEQUENCE, use_local_output=True),
}
# Largest number of parameter entries of a network that is compared: about a second of one core.
MOST_NUMBERS = 2**22
# In float64 the order of summation changes the fourteenth digit.
TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The layout of a parameter over the ranks of a model."""

    mesh: DeviceMesh
    placement: Placement
    shape: torch.Size
    stride: tuple[int, ...]

    def part(self, whole: Tensor) -> Tensor:
        """Return the local shard of a whole tensor. Nothing is sent."""
        found: Tensor = distribute_tensor(whole, self.mesh, [self.placement], src_data_rank=None).to_local()
        return found

    def distributed(self, part: Tensor) -> DTensor:
        """Return the DTensor of which this is the local shard."""
        return DTensor.from_local(
            part, self.mesh, [self.placement], run_check=False, shape=self.shape, stride=self.stride
        )


def model_mesh(group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    """Return the mesh of the ranks that hold the parts of one model."""
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=("model",))


def carry_out(plan: Plan, network: nn.Module, mesh: DeviceMesh) -> dict[str, Cut]:
    """Leave each rank its part of every layer in the plan.

    Returns:
        Layouts by the name of the parameter in the network, of the parameters that are in parts.
    """
    cuts: dict[str, Cut] = {}
    for name, words in plan.layers.items():
        layer = network.get_submodule(name)
        for word in words:
            if word == "split_sequence":
                layer.register_forward_pre_hook(partial(_split_input, mesh))
            elif word == "gather_sequence":
                layer.register_forward_hook(partial(_gather_output, mesh))
            else:
                cuts |= {f"{name}.{own}": cut for own, cut in _parallelize(layer, STYLES[word](), mesh).items()}
    for name, constants in plan.constants.items():
        container = network.get_submodule(name)
        assert isinstance(container, ProgramModel)
        container.rebind({constant: count_of(container, constant) // mesh.size() for constant in constants})
    return cuts


def _parallelize(layer: nn.Module, style: ParallelStyle, mesh: DeviceMesh) -> dict[str, Cut]:
    shell = parallelize_module(_shell(layer), mesh, style, src_data_rank=None)
    cuts: dict[str, Cut] = {}
    for name, layout in shell.named_parameters():
        assert isinstance(layout, DTensor)
        cuts[name] = Cut(mesh=mesh, placement=layout.placements[0], shape=layout.shape, stride=layout.stride())
        whole = layer.get_parameter(name)
        part = nn.Parameter(cuts[name].part(whole.detach()).clone(), requires_grad=whole.requires_grad)
        layer.register_parameter(name, part)

    shell.forward = partial(_computed_by, shell)
    layer.forward = partial(forward, layer, shell, cuts)
    return {name: cut for name, cut in cuts.items() if isinstance(cut.placement, Shard)}


def forward(layer: nn.Module, shell: nn.Module, cuts: Mapping[str, Cut], *inputs: Tensor, **named: Tensor) -> Tensor:
    """Run a layer in parts. Called `forward`, so that hooks find the layer on the stack.

    named: the input by its name, as in `linear(input=x)`; `parallelize_module` takes positional inputs only.
    """
    held: dict[str, Tensor] = {name: cut.distributed(layer.get_parameter(name)) for name, cut in cuts.items()}
    output: Tensor = functional_call(shell, held, (*inputs, *named.values()))
    # The result of a collective under way has no storage, for which hooks ask.
    return output if type(output) is Tensor else output.clone()


def _computed_by(shell: nn.Module, x: Tensor) -> Tensor:
    if isinstance(shell, nn.Linear):
        return F.linear(x, shell.weight, shell.bias)
    if isinstance(shell, nn.Embedding):
        return F.embedding(x, shell.weight)
    assert isinstance(shell, nn.LayerNorm | nn.RMSNorm)
    shape = list(shell.normalized_shape)
    if isinstance(shell, nn.LayerNorm):
        return F.layer_norm(x, shape, shell.weight, shell.bias, shell.eps)
    return F.rms_norm(x, shape, shell.weight, shell.eps)


def _shell(layer: nn.Module) -> nn.Module:
    """Return a layer like this one without numbers and hooks."""
    with torch.device("meta"):
        if isinstance(layer, nn.Linear):
            return nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        if isinstance(layer, nn.Embedding):
            return nn.Embedding(layer.num_embeddings, layer.embedding_dim)
        assert isinstance(layer, nn.LayerNorm | nn.RMSNorm)
        shape, has_weight = layer.normalized_shape, layer.elementwise_affine
        if isinstance(layer, nn.LayerNorm):
            return nn.LayerNorm(shape, layer.eps, elementwise_affine=has_weight, bias=layer.bias is not None)
        return nn.RMSNorm(shape, layer.eps, elementwise_affine=has_weight)


def _split_input(mesh: DeviceMesh, layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Make the first input the local part of the sequence."""
    size = inputs[0].shape[SEQUENCE]
    if size % mesh.size():
        raise RunError(
            f"dimension {SEQUENCE} is {size}, which {mesh.size()} ranks cannot share evenly; expected a "
            "multiple. Write strategy.sequence=false, or another length"
        )
    return (_laid_out(inputs[0], mesh, Replicate(), Shard(SEQUENCE)), *inputs[1:])


def _gather_output(mesh: DeviceMesh, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Make the output the whole sequence."""
    return _laid_out(output, mesh, Shard(SEQUENCE), Replicate())


def _laid_out(value: Tensor, mesh: DeviceMesh, before: Placement, after: Placement) -> Tensor:
    laid_out = DTensor.from_local(value, mesh, [before], run_check=False).redistribute(placements=[after])
    found: Tensor = laid_out.to_local()
    return found


def difference(network: nn.Module, plan: Plan, inputs: Mapping[str, Tensor], *, mesh: DeviceMesh) -> str | None:
    """Return how a network in parts differs from the whole one, or None. Every rank of the mesh must call it.

    Outputs and gradients are compared in float64 and in evaluation, with random inputs and weights.

    Args:
        network: Whole network with the same numbers on every rank; it is not changed.
        inputs: Batch entries by name, of which only the shapes and dtypes matter.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        whole = copy.deepcopy(network).double().eval()
        for parameter in whole.parameters():  # zeros would hide what they are multiplied by
            if parameter.is_floating_point():
                parameter.data += 0.1 * torch.randn(parameter.shape).to(parameter.device)
        data = {name: _numbers(one).to(mesh.device_type) for name, one in inputs.items()}
    parts = copy.deepcopy(whole)
    cuts = carry_out(plan, parts, mesh)
    try:
        expected = _computed(whole, data)
    except Exception as error:  # a network may refuse inputs that the data never has
        log.info("strategy.plan is not compared with the whole network, which refuses random inputs: %s", error)
        return None
    found: list[str | None] = [None] * mesh.size()
    dist.all_gather_object(found, _compared(parts, data, cuts, *expected), group=mesh.get_group())
    return next((one for one in found if one is not None), None)


def _compared(
    parts: nn.Module,
    data: Mapping[str, Tensor],
    cuts: Mapping[str, Cut],
    outputs: list[Tensor],
    gradients: Mapping[str, Tensor],
) -> str | None:
    try:
        found, slopes = _computed(parts, data)
    except Exception as error:
        return f"its forward or backward in parts raises {one_line(error)}"
    if len(found) != len(outputs) or not all(map(_is_same, found, outputs)):
        return "its output in parts is another one"
    own = {name: cuts[name].part(whole) if name in cuts else whole for name, whole in gradients.items()}
    others = [name for name, gradient in own.items() if not _is_same(slopes[name], gradient)]
    return f"the gradient of {others[0]} in parts is another one" if others else None


def _computed(network: nn.Module, data: Mapping[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    outputs = [one for one in tensors_in(network_call(network, tuple(data))(network, data)) if one.requires_grad]
    total = sum(((one * _weights(one)).sum() for one in outputs), torch.zeros(()))
    total.backward()
    none = torch.zeros((), dtype=torch.float64, device=total.device)
    return outputs, {
        name: none.expand(one.shape) if one.grad is None else one.grad for name, one in network.named_parameters()
    }


def _weights(output: Tensor) -> Tensor:
    return torch.arange(output.numel(), dtype=output.dtype, device=output.device).cos().view(output.shape)


def _numbers(like: Tensor) -> Tensor:
    if like.is_floating_point():
        return torch.randn(like.shape, dtype=torch.float64)
    return torch.randint(0, 2, like.shape).to(like.dtype)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE))
