"""Layers split by torch.distributed.tensor.parallel, and a comparison of the split network with the whole network.

A split layer keeps its class and its names. Its parameters are plain tensors with the local shard, and become DTensors
only within the layer's forward. The reason is that fused AdamW and `clip_grad_norm_` reject lists in which only some
parameters are DTensors.

If the backward of a DTensor changes its layout, it cannot be differentiated again (torch 2.13). The second gradients of
two split layers had the norms 0.27 and 0.19 instead of 5.37 and 6.72, without an error. Therefore, the compatibility
table rejects losses that differentiate a gradient.
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
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.func import functional_call

from exp.errors import one_line
from exp.models.containers import ProgramModel
from exp.models.inference import network_call
from exp.nested import tensors_in
from exp.strategies.tensor_plan import Plan

log = logging.getLogger(__name__)

STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "column": ColwiseParallel,
    "column_whole": partial(ColwiseParallel, output_layouts=Replicate()),
    "row": RowwiseParallel,
    "vocabulary": partial(RowwiseParallel, input_layouts=Replicate()),
}
# Maximum number of parameter entries of a network that is compared. This comparison takes about a second on one core.
MOST_NUMBERS = 2**22
# Relative tolerance of the comparison. In float64, the order of summation changes only the fourteenth digit.
TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Layout of a parameter over the ranks that split one model.

    Attributes:
        mesh: Device mesh of the ranks.
        placement: Placement of the parameter on the mesh: a shard or a copy.
        shape: Shape of the whole parameter.
        stride: Stride of the whole parameter.
    """

    mesh: DeviceMesh
    placement: Placement
    shape: torch.Size
    stride: tuple[int, ...]

    def part(self, whole: Tensor) -> Tensor:
        """Return the local shard of a whole tensor. No data is sent between ranks."""
        found: Tensor = distribute_tensor(whole, self.mesh, [self.placement], src_data_rank=None).to_local()
        return found

    def as_dtensor(self, part: Tensor) -> DTensor:
        """Return a DTensor with this layout, given the local shard."""
        return DTensor.from_local(
            part, self.mesh, [self.placement], run_check=False, shape=self.shape, stride=self.stride
        )


def model_mesh(group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    """Return the device mesh of the ranks that split one model."""
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=("model",))


def apply_plan(plan: Plan, network: nn.Module, mesh: DeviceMesh) -> dict[str, Cut]:
    """Split every layer in the plan in place. Each rank keeps its shards of the parameters.

    Returns:
        Layout of each split parameter, by name.
    """
    cuts: dict[str, Cut] = {}
    counts = plan.counts(network)
    for name, word in plan.layers.items():
        found = _parallelize(network.get_submodule(name), STYLES[word](), mesh)
        cuts |= {f"{name}.{own}": cut for own, cut in found.items()}
    for name, constants in plan.constants.items():
        container = network.get_submodule(name)
        assert isinstance(container, ProgramModel)
        container.rebind({one: counts[f"{name}.{one}".lstrip(".")] // mesh.size() for one in constants})
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

    shell.forward = partial(_call_layer, shell)
    layer.forward = partial(forward, layer, shell, cuts)
    return {name: cut for name, cut in cuts.items() if isinstance(cut.placement, Shard)}


def forward(layer: nn.Module, shell: nn.Module, cuts: Mapping[str, Cut], *inputs: Tensor, **named: Tensor) -> Tensor:
    """Run a split layer. The function has the name `forward` because hooks search the stack for this name.

    Args:
        layer: The layer, with the local shards.
        shell: Copy of the layer without values, which torch has parallelized.
        cuts: Layouts of the layer's parameters, by name.
        inputs: The input, if it is a positional argument.
        named: The input, if it is a keyword argument, as in `linear(input=x)`. `parallelize_module` requires a
            positional argument, so the input is passed on by position.
    """
    held: dict[str, Tensor] = {name: cut.as_dtensor(layer.get_parameter(name)) for name, cut in cuts.items()}
    output: Tensor = functional_call(shell, held, (*inputs, *named.values()))
    # The output is copied, because the result of an unfinished collective has no storage, but hooks need one.
    return output if type(output) is Tensor else output.clone()


def _call_layer(shell: nn.Module, x: Tensor) -> Tensor:
    if isinstance(shell, nn.Embedding):
        return F.embedding(x, shell.weight)
    assert isinstance(shell, nn.Linear)
    return F.linear(x, shell.weight, shell.bias)


def _shell(layer: nn.Module) -> nn.Module:
    """Return a layer of the same class and sizes, without values and hooks."""
    with torch.device("meta"):
        if isinstance(layer, nn.Embedding):
            return nn.Embedding(layer.num_embeddings, layer.embedding_dim)
        assert isinstance(layer, nn.Linear)
        return nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)


def find_difference(network: nn.Module, plan: Plan, inputs: Mapping[str, Tensor], *, mesh: DeviceMesh) -> str | None:
    """Return a description of how the split network differs from the whole network. Return None if they agree.

    Outputs and gradients are compared in float64 and in evaluation mode, with random inputs and weights. Every rank of
    the mesh must call this function.

    Args:
        network: Whole network with the same values on every rank. The network is not changed.
        plan: Plan of the split.
        inputs: Values of the batch by name. Only their shapes and dtypes are used.
        mesh: Device mesh of the ranks that split the model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        whole = copy.deepcopy(network).double().eval()
        for parameter in whole.parameters():  # a parameter that is zero would hide errors in values multiplied by it
            if parameter.is_floating_point():
                parameter.data += 0.1 * torch.randn(parameter.shape).to(parameter.device)
        data = {name: _numbers(one).to(mesh.device_type) for name, one in inputs.items()}
    parts = copy.deepcopy(whole)
    cuts = apply_plan(plan, parts, mesh)
    try:
        outputs, gradients = _compute(whole, data)
    except Exception as error:  # a network may reject random inputs that the data never contains
        log.info("strategy.plan is not checked, because the network rejects random inputs: %s", error)
        return None
    gradients |= {name: cut.part(gradients[name]) for name, cut in cuts.items() if name in gradients}
    found: list[str | None] = [None] * mesh.size()
    dist.all_gather_object(found, _compare(parts, data, outputs, gradients), group=mesh.get_group())
    return next((one for one in found if one is not None), None)


def _compare(
    parts: nn.Module, data: Mapping[str, Tensor], outputs: list[Tensor], gradients: Mapping[str, Tensor]
) -> str | None:
    """Return a description of how this rank's part differs from the whole network. Return None if they agree.

    Args:
        parts: Split network.
        data: Inputs by name.
        outputs: Outputs of the whole network.
        gradients: Gradients of the whole network by parameter name. For split parameters, this rank's shards.
    """
    try:
        found, own = _compute(parts, data)
    except Exception as error:
        return f"the forward or backward of the split network raises {one_line(error)}"
    if len(found) != len(outputs) or not all(map(_is_close, found, outputs)):
        return "the output differs"
    other = next((name for name, gradient in gradients.items() if not _is_close(own[name], gradient)), None)
    return None if other is None else f"the gradient of {other} differs"


def _compute(network: nn.Module, data: Mapping[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the outputs of a network, and its gradients by parameter name. A missing gradient becomes zeros."""
    outputs = [one for one in tensors_in(network_call(network, tuple(data))(network, data)) if one.requires_grad]
    # The outputs are weighted, because the gradients of a plain sum may be zero. For example, the sum of a normalized
    # output is constant.
    sum((torch.sum(one * _weights(one)) for one in outputs), torch.zeros(())).backward()
    return outputs, {
        name: torch.zeros_like(one) if one.grad is None else one.grad.to_dense()
        for name, one in network.named_parameters()
    }


def _weights(output: Tensor) -> Tensor:
    return torch.arange(output.numel(), dtype=output.dtype, device=output.device).cos().view(output.shape)


def _is_close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)


def _numbers(like: Tensor) -> Tensor:
    if like.is_floating_point():
        return torch.randn(like.shape, dtype=torch.float64)
    return torch.randint(0, 2, like.shape).to(like.dtype)
