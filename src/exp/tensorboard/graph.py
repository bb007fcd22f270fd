"""The Graphs tab: which layer and which function feeds which, of one forward on the meta device.

Modules are boxes within boxes by their names, and functions stand in the module that calls them, so that the picture
has the names of the config. Nothing is traced or compiled: whatever runs is drawn, control flow as it went.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from tensorboard.compat.proto.attr_value_pb2 import AttrValue
from tensorboard.compat.proto.graph_pb2 import GraphDef
from tensorboard.compat.proto.node_def_pb2 import NodeDef
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.versions_pb2 import VersionDef
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from exp.nested import tensors_in

INPUT, OUTPUT = "input", "output"


def draw(network: nn.Module, inputs: tuple[Tensor, ...]) -> GraphDef:
    """The graph of `network(*inputs)`, in evaluation and without gradients; on the meta device next to nothing.

    Raises whatever the forward raises.
    """
    recorder = _Recorder()
    for place, tensor in enumerate(inputs):
        recorder.add(f"{INPUT}/{place}" if len(inputs) > 1 else INPUT, "Placeholder", (), tensor)
    modes = {module: module.training for module in network.modules()}
    network.eval()
    with ExitStack() as stack:
        for path, module in network.named_modules():
            stack.callback(module.register_forward_pre_hook(recorder.enter(path)).remove)
            stack.callback(module.register_forward_hook(recorder.leave, always_call=True).remove)
        try:
            with torch.no_grad(), recorder:
                output = network(*inputs)
        finally:
            for module, mode in modes.items():
                module.training = mode
    for place, tensor in enumerate(found := list(tensors_in(output))):
        recorder.add(f"{OUTPUT}/{place}" if len(found) > 1 else OUTPUT, "Output", [tensor], None)
    return GraphDef(node=recorder.nodes, versions=VersionDef(producer=22))


class _Recorder(TorchFunctionMode):
    """A node for each call of a torch function that takes a tensor and gives one, named by the module around it."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[NodeDef] = []
        # By identity, and kept, for an identity is given again when its tensor is gone.
        self._made_by: dict[int, tuple[Tensor, str]] = {}
        self._scopes: list[str] = [""]
        self._names: Counter[str] = Counter()

    def enter(self, path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._scopes.append(path.replace(".", "/"))

        return hook

    def leave(self, *_: Any) -> None:
        self._scopes.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        sources = [tensor for tensor in tensors_in([args, kwargs]) if id(tensor) in self._made_by]
        # What is changed in place, or handed through, is from here on this call's.
        if sources and any(True for _ in tensors_in(result)):
            self.add("/".join(filter(None, [self._scopes[-1], _title(func)])), _title(func), sources, result)
        return result

    def add(self, name: str, operator: str, sources: Sequence[Tensor], result: Any) -> None:
        self._names[name] += 1
        if self._names[name] > 1:
            name = f"{name}_{self._names[name]}"
        given = dict.fromkeys(self._made_by[id(tensor)][1] for tensor in sources if id(tensor) in self._made_by)
        node = NodeDef(name=name, op=operator, input=list(given))
        tensors = list(tensors_in(result))
        shapes = [TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in one.shape]) for one in tensors]
        node.attr["_output_shapes"].CopyFrom(AttrValue(list=AttrValue.ListValue(shape=shapes)))
        if tensors:
            node.attr["dtype"].CopyFrom(AttrValue(s=str(tensors[0].dtype).removeprefix("torch.").encode()))
        self.nodes.append(node)
        for tensor in tensors:
            self._made_by[id(tensor)] = tensor, name


def _title(func: Any) -> str:
    """`linear` for torch.nn.functional.linear, `add` for Tensor.__add__."""
    name = resolve_name(func) or getattr(func, "__name__", type(func).__name__)
    return name.rpartition(".")[2].strip("_") or "function"
