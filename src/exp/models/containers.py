"""The containers of YAML models: layers by name, wired by a forward program or, where that is plain, folded.

The layers' keys in the state dict are what a hand-written module would have: `linears.0.weight`.
"""

from __future__ import annotations

import copy
import inspect
import keyword
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any, ClassVar, Literal

import torch
from torch import fx, nn

from exp.errors import config_error
from exp.models.compiler import compile_forward
from exp.models.freezing import find_frozen
from exp.models.graphs import graph_of_function
from exp.models.initialisation import Scheme, initialise
from exp.models.layers import Held, built
from exp.models.program import Program, layers_used, parse
from exp.models.syntax import ProgramError

_NOT_CALLABLE = (nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

Container = Literal["sequential", "module_list", "module_dict"]


class ProgramModel(nn.Module):
    """Base of the containers: holds the layers and runs the program. Abstract; use one of its subclasses.

    layers: name to layer. A layer is a Module, a Parameter, or a list or mapping of these, which becomes a ModuleList,
        ParameterList, ModuleDict or ParameterDict. A container may be a layer of another.
    forward: the forward program (docs/models.md), or None to fold the layers where the class does so.
    container: holds the same layers in another container, which folds them as this one does; None is the class itself.
    programs: further forward programs by name, of the same layers and inputs: methods of the network by these names,
        which a phase may run instead of `forward` (docs/training.md).
    inputs: the names of the network's inputs. With several, the network takes a mapping with these keys as well.
    constants: values that the program may use by name: numbers, strings, bools, None, and lists of them.
    functions: functions that the program may call by name, beside those of torch that are listed. They take what the
        program gives them, and give tensors. A torch.autograd.Function stands for its `apply`.
    initialisation: pattern to scheme, see models/initialisation.py; applied once all shapes are known.
    freeze: patterns of what does not learn, see models/freezing.py.

    Raises ProgramError for an error in the program, ConfigError for one in the layers.
    """

    layers_as: ClassVar[Literal["list", "dict"]] = "list"

    def __init__(
        self,
        *,
        layers: Mapping[str, Held],
        forward: str | None = None,
        container: Container | None = None,
        programs: Mapping[str, str] | None = None,
        inputs: Sequence[str] = ("x",),
        constants: Mapping[str, object] | None = None,
        functions: Mapping[str, Callable[..., object]] | None = None,
        initialisation: Mapping[str, Scheme] | None = None,
        freeze: Sequence[str] = (),
    ) -> None:
        super().__init__()
        if container is not None:
            # As a lazy layer of torch becomes the class that it stands for.
            self.__class__ = self._chosen(container, folds=forward is None)
        self.input_names = tuple(inputs)
        self._layer_names = tuple(layers)
        self._constants = {name: _constant(name, value) for name, value in (constants or {}).items()}
        self._functions = {name: _callable(name, value) for name, value in (functions or {}).items()}
        self._initialisation = dict(initialisation or {})
        self._freeze = freeze
        for name, layer in layers.items():
            self._add(name, layer)
        self._is_folded = forward is None
        self._text = self._fold() if forward is None else forward
        self._programs = {name: _program_name(self, name, text) for name, text in (programs or {}).items()}
        self._bind()
        self._options_pending = True
        if not any(map(nn.parameter.is_lazy, self.parameters())):
            self.apply_options()

    def forward(self, *inputs: Any) -> Any:
        """What the program returns. Each instance has a `forward` of its own, with the inputs as its parameters."""
        return self.__dict__["forward"](*inputs)

    @property
    def program(self) -> Program:
        """The parsed program."""
        used = layers_used(self._programs.values(), self._layer_names)
        return self._parsed(self._text, used_elsewhere=used, is_bounded=not self._is_folded)

    @property
    def programs(self) -> dict[str, Program]:
        """The parsed further programs, by name."""
        return {name: self._parsed(text, used_elsewhere=self._layer_names) for name, text in self._programs.items()}

    def graph_module(self, name: str | None = None) -> fx.GraphModule:
        """A torch.fx.GraphModule that shares this network's layers, for passes that work on graphs.

        name: of a further program; None is `forward`.

        Raises: DependsOnMode where the program branches on `training`.
        """
        program = self.program if name is None else self.programs[name]
        function = self._function(program, asserts=False)
        return fx.GraphModule(self, graph_of_function(self, function), type(self).__name__)

    @property
    def reads_training(self) -> bool:
        """Whether a program of it asks if the network trains: one forward takes one of its branches."""
        return any("training" in program.loaded for program in (self.program, *self.programs.values()))

    @property
    def chain(self) -> list[str]:
        """The paths of the layers that are called one after the other; empty where a program wires them."""
        paths = []
        for name in self._layer_names if self._is_folded else ():
            held = getattr(self, name)
            paths += [f"{name}.{index}" for index in range(len(held))] if isinstance(held, nn.ModuleList) else [name]
        return paths

    @property
    def constants(self) -> dict[str, object]:
        """The values that the program may use by name."""
        return dict(self._constants)

    def rebind(self, constants: Mapping[str, object]) -> None:
        """Lets the program run with other values of some of its constants from now on."""
        self._constants |= {name: _constant(name, value) for name, value in constants.items()}
        self._bind()

    def apply_freeze(self) -> None:
        """Freeze the parameters that the config names, whether they have their shapes or not."""
        find_frozen(self, parameters=self._freeze, key="freeze").apply(self)

    def apply_options(self) -> None:
        """Initialise and freeze, once, as soon as every parameter has its shape."""
        if self._options_pending:
            self._options_pending = False
            initialise(self, self._initialisation)
            self.apply_freeze()

    def _add(self, name: str, layer: Held) -> None:
        if not name.isidentifier() or name.startswith("_") or hasattr(self, name):
            taken = f"{name!r}, which nn.Module uses itself" if hasattr(self, name) else repr(name)
            raise config_error(f"layers.{name}", got=f"a layer named {taken}", expected="a free name like a variable's")
        held = built(layer, f"layers.{name}")
        if isinstance(held, nn.Module):
            self.add_module(name, held)
        else:
            self.register_parameter(name, held)

    def _chosen(self, container: Container, *, folds: bool) -> type[ProgramModel]:
        name = type(self).__name__
        if type(self) in _FOLDING.values() and folds and container in _FOLDING:
            return _FOLDING[container]
        got, fix = f"{container} for a model with a forward program, which wires its layers itself", None
        if type(self) not in _FOLDING.values():
            got = f"{container} for a {name}, whose parameters cannot be called in turn"
        elif container not in _FOLDING:
            got, fix = repr(container), f"Take one of {', '.join(_FOLDING)}"
        expected = "a model whose layers are called one after the other, such as model=sequential or model=mlp"
        raise config_error("container", got=got, expected=expected, fix=fix or "Leave it out")

    def _fold(self) -> str:
        if type(self) not in _FOLDING.values():
            expected = "a program that says how the layers are wired"
            fix = "For example:  forward: |  and below it, indented,  return head(encoder(x))"
            raise config_error("forward", got="no forward program", expected=expected, fix=fix)
        steps = []
        for name in self._layer_names:
            held = getattr(self, name)
            if isinstance(held, nn.ModuleList):
                steps += [f"x = {name}[{index}](x)" for index in range(len(held))]
            elif isinstance(held, nn.Module) and not isinstance(held, _NOT_CALLABLE):
                steps.append(f"x = {name}(x)")
            else:
                got = f"a {type(held).__name__}, which cannot be called in turn"
                raise config_error(f"layers.{name}", got=got, expected="a layer, or a `forward` program")
        if self.input_names != ("x",):
            raise config_error("inputs", got=str(list(self.input_names)), expected="a `forward` program")
        return "\n".join([*steps, "return x"])

    def _parsed(self, text: str, *, used_elsewhere: Iterable[str], is_bounded: bool = True) -> Program:
        return parse(
            text,
            self._layer_names,
            inputs=self.input_names,
            constants=self._constants,
            functions=self._functions,
            used_elsewhere=used_elsewhere,
            is_bounded=is_bounded,
        )

    def _function(self, program: Program, *, asserts: bool = True) -> FunctionType:
        return compile_forward(
            program,
            held={name: getattr(self, name) for name in self._layer_names},
            layers_as=self.layers_as,
            constants=self._constants,
            functions=self._functions,
            asserts=asserts,
        )

    def _bind(self) -> None:
        # On the instance, so that a call costs what it costs by hand and signatures show the inputs' names.
        self.__dict__["forward"] = self._compiled(self.program)
        for name, text in self._programs.items():
            try:
                self.__dict__[name] = self._compiled(self._parsed(text, used_elsewhere=self._layer_names))
            except ProgramError as error:
                error.place = f"programs.{name}"
                raise

    def _compiled(self, program: Program) -> MethodType:
        function = self._function(program)
        forward = _taking_a_mapping(function, self.input_names) if len(self.input_names) > 1 else function
        return MethodType(forward, self)

    def __getstate__(self) -> dict[str, object]:
        bound = {"forward", *self._programs}
        # What torch leaves out, such as a compiled call, is bound to this one, too.
        state = super().__getstate__()  # type: ignore[no-untyped-call]  # torch gives it no types
        return {name: value for name, value in state.items() if name not in bound}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch gives it no types
        self._bind()


class SequentialModel(ProgramModel):
    """Layers called one after the other, or as the program says. `layers` in a program is the list of them."""


class ModuleListModel(ProgramModel):
    """Lists of layers, made by `repeat`: called in order, or as the program says. `layers` is the list of them."""


class ModuleDictModel(ProgramModel):
    """Layers by name: called in order, or as the program says. `layers` in a program is the dict of them."""

    layers_as = "dict"


class ParameterListModel(ProgramModel):
    """Lists of parameters (and layers), wired by the program. `layers` in a program is the list of them."""


class ParameterDictModel(ProgramModel):
    """Parameters (and layers) by name, wired by the program. `layers` in a program is the dict of them."""

    layers_as = "dict"


# The containers that call their layers one after the other where no program says otherwise.
_FOLDING: dict[str, type[ProgramModel]] = {
    "sequential": SequentialModel,
    "module_list": ModuleListModel,
    "module_dict": ModuleDictModel,
}


def _program_name(network: ProgramModel, name: str, text: str) -> str:
    """The text, where its name is free."""
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_") or hasattr(network, name):
        taken = f"{name!r}, which the network has already" if hasattr(network, name) else repr(name)
        raise config_error(f"programs.{name}", got=f"a program named {taken}", expected="a free name like a method's")
    return text


def _constant(name: str, value: object) -> object:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_constant(name, item) for item in value]
    if not isinstance(value, int | float | str | None):
        expected = "a number, a string, a bool, null, or a list of them"
        raise config_error(f"constants.{name}", got=f"a {type(value).__name__}", expected=expected)
    return value


def _callable(name: str, value: object) -> Callable[..., object]:
    if inspect.isclass(value) and issubclass(value, torch.autograd.Function):
        applied: Callable[..., object] = value.apply
        return applied
    if not callable(value) or isinstance(value, nn.Module) or inspect.isclass(value):
        expected = "a function, or a torch.autograd.Function"
        fix = "A layer belongs below `layers`" if isinstance(value, nn.Module) else None
        raise config_error(f"functions.{name}", got=f"a {type(value).__name__}", expected=expected, fix=fix)
    return value


def _taking_a_mapping(function: Callable[..., object], names: tuple[str, ...]) -> Callable[..., object]:
    def forward(self: nn.Module, *inputs: object, **named: object) -> object:
        if len(inputs) == 1 and isinstance(inputs[0], Mapping) and not named:
            return function(self, **{name: inputs[0][name] for name in names})
        return function(self, *inputs, **named)

    vars(forward)["__signature__"] = inspect.signature(function)
    return forward


# -- a network seen through another of its forwards: a further program, or a method of a module --


def with_forward(network: nn.Module, name: str) -> nn.Module:
    """A module whose forward is the network's method of that name, and whose everything else is the network's.

    It shares layers, parameters, buffers and hooks, so that what is trained, moved, loaded or observed in one is so in
    the other. It is not to be registered in a module, for then its parameters were there twice.

    Raises: AttributeError where there is no such method.
    """
    method = getattr(network, name)
    view = copy.copy(network)  # shallow: the tables of layers and parameters are the same objects
    view.__dict__["forward"] = method
    # A network that torch.compile has in hand would run its own forward.
    view.__dict__["_compiled_call_impl"] = None
    view.__dict__["forward_name"] = name
    return view


def forward_name(module: nn.Module) -> str | None:
    """Which of its forwards a network is seen through; None where it is its own."""
    name = vars(module).get("forward_name")
    return name if isinstance(name, str) else None


def forward_names(network: nn.Module) -> list[str]:
    """What `with_forward` takes: the programs of a YAML model, the public methods of a module of one's own."""
    if isinstance(network, ProgramModel):
        return list(network.programs)
    classes = type(network).__mro__
    own = classes[: classes.index(nn.Module)]
    names = [name for cls in own for name, value in vars(cls).items() if callable(value) and not name.startswith("_")]
    return [name for name in dict.fromkeys(names) if not hasattr(nn.Module, name)]


# -- where a layer stands in the config --


def config_key(network: nn.Module, path: str) -> str:
    """The dotted config key of the submodule at `path`; below a layer that is not ours, its own path goes on."""
    key, module = "model", network
    for name in path.split(".") if path else ():
        if isinstance(module, ProgramModel):
            key = f"{key}.layers.{name}"
        elif isinstance(module, nn.ModuleList) and module.__dict__.get("repeated"):
            key = f"{key}.layer"
        else:
            key = f"{key}.{name}"
        module = module.get_submodule(name)
    return key


def path_of(network: nn.Module, module: nn.Module) -> str:
    """The path of a submodule, of several the first. Raises KeyError where the network does not hold it."""
    paths: dict[nn.Module, str] = {held: path for path, held in reversed(list(network.named_modules()))}
    return paths[module]
