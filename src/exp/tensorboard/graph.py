"""The Graphs tab: which layer and which function feeds which, drawn from one traced forward.

Modules are boxes within boxes by their names, and functions stand in the module that calls them, so that the picture
has the names of the config. Whatever ran is drawn, control flow as it went.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from tensorboard.compat.proto.attr_value_pb2 import AttrValue
from tensorboard.compat.proto.graph_pb2 import GraphDef
from tensorboard.compat.proto.node_def_pb2 import NodeDef
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.versions_pb2 import VersionDef
from torch import Tensor, nn
from torch.overrides import resolve_name

from exp.models.forward_trace import ForwardTrace
from exp.nested import tensors_in

INPUT, OUTPUT = "input", "output"


def draw(trace: ForwardTrace) -> GraphDef:
    """The graph of a forward, a node for each function that what it was given reached."""
    drawing = _Drawing()
    for place, tensor in enumerate(trace.inputs):
        drawing.add(f"{INPUT}/{place}" if len(trace.inputs) > 1 else INPUT, "Placeholder", (), [tensor])
    scopes: dict[nn.Module | None, str] = {
        module: path.replace(".", "/") for path, module in trace.network.named_modules()
    }
    for operation in trace.operations:
        # What is changed in place, or handed through, is from here on this call's.
        if drawing.knows(operation.sources):
            title = _title(operation.function)
            name = "/".join(filter(None, [scopes.get(operation.module, ""), title]))
            drawing.add(name, title, operation.sources, operation.results)
    for place, tensor in enumerate(found := list(tensors_in(trace.output))):
        drawing.add(f"{OUTPUT}/{place}" if len(found) > 1 else OUTPUT, "Output", [tensor], ())
    return GraphDef(node=drawing.nodes, versions=VersionDef(producer=22))


class _Drawing:
    """Nodes by the functions that they stand for, and which of them made each tensor."""

    def __init__(self) -> None:
        self.nodes: list[NodeDef] = []
        # By identity: the trace keeps every tensor.
        self._made_by: dict[int, str] = {}
        self._names: Counter[str] = Counter()

    def knows(self, tensors: Sequence[Tensor]) -> bool:
        """Whether one of them was made by a node."""
        return any(id(tensor) in self._made_by for tensor in tensors)

    def add(self, name: str, operator: str, sources: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        self._names[name] += 1
        if self._names[name] > 1:
            name = f"{name}_{self._names[name]}"
        given = dict.fromkeys(self._made_by[id(tensor)] for tensor in sources if id(tensor) in self._made_by)
        node = NodeDef(name=name, op=operator, input=list(given))
        shapes = [TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in one.shape]) for one in results]
        node.attr["_output_shapes"].CopyFrom(AttrValue(list=AttrValue.ListValue(shape=shapes)))
        if results:
            node.attr["dtype"].CopyFrom(AttrValue(s=str(results[0].dtype).removeprefix("torch.").encode()))
        self.nodes.append(node)
        for tensor in results:
            self._made_by[id(tensor)] = name


def _title(func: Callable[..., object]) -> str:
    """`linear` for torch.nn.functional.linear, `add` for Tensor.__add__."""
    name = resolve_name(func) or getattr(func, "__name__", type(func).__name__)
    return name.rpartition(".")[2].strip("_") or "function"
