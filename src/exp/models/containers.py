"""The containers of YAML models. A container has named layers.

A forward program calls the layers. Without a program, the layers are called in order.

The layers have the same keys in the state dict as in a hand-written module, such as `linears.0.weight`.
"""

from __future__ import annotations

import copy
import inspect
import keyword
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from exp.errors import config_error
from exp.models.compiler import compile_forward
from exp.models.freezing import find_frozen
from exp.models.initialisation import Scheme, initialise
from exp.models.layers import Held, build_layer
from exp.models.program import Program, parse, require_layers_used
from exp.models.syntax import ProgramError

_NOT_CALLABLE = (nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

Container = Literal["sequential", "module_list", "module_dict"]


# Compiled programs by the structure of their networks. Jobs that are trained together have networks of the same
# structure. Without this cache, compilation took a fifth of the time that a job needs outside its training steps.
_FUNCTIONS: dict[tuple[object, ...], FunctionType] = {}


def _form_of(entry: tuple[str, nn.Module | torch.Tensor]) -> tuple[object, ...]:
    name, held = entry
    if not isinstance(held, nn.Module):
        return name, type(held)
    modules = held.named_modules(remove_duplicate=False)
    tensors = (*held.named_parameters(remove_duplicate=False), *held.named_buffers(remove_duplicate=False))
    return (name, *((path, type(module)) for path, module in modules), *(path for path, _ in tensors))


class ProgramModel(nn.Module):
    """Base class of the containers. A container has layers and a forward program.

    Args:
        layers: The layers by name. A layer is a Module, which may be another container, or a Parameter. A list of
            layers becomes a ModuleList or ParameterList, and a mapping of layers becomes a ModuleDict or ParameterDict.
        forward: The forward program (docs/models.md). None calls the layers in order, if the class supports this.
        container: Name of the container class that replaces this class. Only valid without a forward program. Default:
            None, which keeps this class.
        programs: Additional forward programs by name, with the same layers and inputs. They become methods of the
            network. A phase of the training may run one of them instead of `forward` (docs/training.md).
        inputs: The names of the network's inputs. Default: x.
        constants: The constants of the program by name: numbers, strings, bools, None, and lists of these.
        functions: Functions that the program may call by name, in addition to the listed functions of torch. They
            return tensors. For a torch.autograd.Function, its method `apply` is called.
        initialisation: Initialization scheme of each pattern of parameters; see models/initialisation.py. Parameters
            are initialized after all shapes are inferred.
        freeze: Patterns of parameters to freeze; see models/freezing.py.

    Raises:
        ProgramError: The program has an error.
        ConfigError: The layers have an error.
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
            # The class of the object is changed, as in torch's lazy layers.
            self.__class__ = self._choose(container, folds=forward is None)
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
        for name in programs or {}:
            _require_free_name(self, name, key=f"programs.{name}", kind="a program")
        self._programs = dict(programs or {})
        self._bind()
        self._options_pending = True
        if not any(map(nn.parameter.is_lazy, self.parameters())):
            self.apply_options()

    def forward(self, *inputs: Any) -> Any:
        """Return the program's output.

        Each instance has an attribute `forward` that overrides this method. Its parameters are the network's inputs.
        """
        return self.__dict__["forward"](*inputs)

    @property
    def program(self) -> Program:
        """The parsed program `forward`."""
        return self._program("forward")

    @property
    def programs(self) -> dict[str, Program]:
        """The parsed additional programs, by name."""
        return {name: self._program(name) for name in self._programs}

    @property
    def reads_training(self) -> bool:
        """True if a program reads `training`. In this case, a single forward pass may not run all branches."""
        return any("training" in program.loaded for program in (self.program, *self.programs.values()))

    @property
    def chain(self) -> list[str]:
        """The paths of the layers that are called in order. The list is empty if the model has a forward program."""
        paths = []
        for name in self._layer_names if self._is_folded else ():
            held = getattr(self, name)
            paths += [f"{name}.{index}" for index in range(len(held))] if isinstance(held, nn.ModuleList) else [name]
        return paths

    @property
    def constants(self) -> dict[str, object]:
        """The constants of the program by name."""
        return dict(self._constants)

    def rebind(self, constants: Mapping[str, object]) -> None:
        """Change constants of the program.

        Args:
            constants: The new values by name. The other constants do not change.
        """
        self._constants |= {name: _constant(name, value) for name, value in constants.items()}
        self._bind()

    def apply_freeze(self) -> None:
        """Freeze the parameters that match `freeze`, including lazy parameters."""
        find_frozen(self, parameters=self._freeze, key="freeze").apply(self)

    def apply_options(self) -> None:
        """Initialize and freeze the parameters.

        Call this method after every parameter has its shape. Only the first call has an effect.
        """
        if self._options_pending:
            self._options_pending = False
            initialise(self, self._initialisation)
            self.apply_freeze()

    def _add(self, name: str, layer: Held) -> None:
        _require_free_name(self, name, key=f"layers.{name}", kind="a layer")
        held = build_layer(layer, f"layers.{name}")
        if isinstance(held, nn.Module):
            self.add_module(name, held)
        else:
            self.register_parameter(name, held)

    def _choose(self, container: Container, *, folds: bool) -> type[ProgramModel]:
        if type(self) in _FOLDING.values() and folds and container in _FOLDING:
            return _FOLDING[container]
        got = f"{container} for a {type(self).__name__}" + ("" if folds else " with a forward program")
        expected = f"one of {', '.join(_FOLDING)}, for a model whose layers are called in order, such as model=mlp"
        raise config_error("container", got=got, expected=expected, fix="Remove `container`")

    def _fold(self) -> str:
        if type(self) not in _FOLDING.values():
            expected = "a program that calls the layers"
            fix = "For example:  forward: |  and, indented on the next line,  return head(encoder(x))"
            raise config_error("forward", got="no forward program", expected=expected, fix=fix)
        steps = []
        for name in self._layer_names:
            held = getattr(self, name)
            if isinstance(held, nn.ModuleList):
                steps += [f"x = {name}[{index}](x)" for index in range(len(held))]
            elif isinstance(held, nn.Module) and not isinstance(held, _NOT_CALLABLE):
                steps.append(f"x = {name}(x)")
            else:
                got, fix = f"a {type(held).__name__}, which cannot be called", "Or write a `forward` program"
                expected = "a layer that can be called, because the model has no `forward` program"
                raise config_error(f"layers.{name}", got=got, expected=expected, fix=fix)
        if self.input_names != ("x",):
            expected = "the single input x, or a `forward` program that uses these inputs"
            raise config_error("inputs", got=str(list(self.input_names)), expected=expected)
        return "\n".join([*steps, "return x"])

    def _program(self, name: str) -> Program:
        """Return a parsed program.

        Args:
            name: `forward`, or a key of `programs`.
        """
        is_forward = name == "forward"
        return parse(
            self._text if is_forward else self._programs[name],
            self._layer_names,
            inputs=self.input_names,
            constants=self._constants,
            functions=self._functions,
            is_bounded=not (is_forward and self._is_folded),
        )

    def _function(self, program: Program) -> FunctionType:
        held = {name: getattr(self, name) for name in self._layer_names}
        form = (program.text, program.names, self.layers_as, repr(self._constants))
        key = (*form, *map(_form_of, held.items()), *((name, id(one)) for name, one in self._functions.items()))
        if key not in _FUNCTIONS:
            _FUNCTIONS[key] = compile_forward(
                program,
                held=held,
                layers_as=self.layers_as,
                constants=self._constants,
                functions=self._functions,
            )
        return _FUNCTIONS[key]

    def _bind(self) -> None:
        # The functions are attributes of the instance, because a call is then as fast as in a hand-written module, and
        # the signature contains the names of the inputs.
        found: list[ProgramError] = []
        programs: list[Program] = []
        for name in ("forward", *self._programs):
            try:
                programs.append(self._program(name))
                self.__dict__[name] = MethodType(self._function(programs[-1]), self)
            except ProgramError as error:
                for one in (error, *error.others):
                    one.place = name if name == "forward" else f"programs.{name}"
                    found.append(one)
        if found:
            found[0].others = tuple(found[1:])
            raise found[0]
        require_layers_used(programs)

    def __getstate__(self) -> dict[str, object]:
        bound = {"forward", *self._programs}
        # nn.Module removes other attributes that are bound to this instance, such as a compiled call.
        state = super().__getstate__()  # type: ignore[no-untyped-call]  # untyped in torch
        return {name: value for name, value in state.items() if name not in bound}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # untyped in torch
        self._bind()


class SequentialModel(ProgramModel):
    """Container that calls its layers in order, or by a forward program. In the program, `layers` is a list."""


class ModuleListModel(ProgramModel):
    """Container that behaves like SequentialModel, for lists of layers that `repeat` creates."""


class ModuleDictModel(ProgramModel):
    """Container that calls its layers in order, or by a forward program. In the program, `layers` is a dict."""

    layers_as = "dict"


class ParameterListModel(ProgramModel):
    """Container of parameters and layers that a forward program uses. In the program, `layers` is a list."""


class ParameterDictModel(ProgramModel):
    """Container of parameters and layers that a forward program uses. In the program, `layers` is a dict."""

    layers_as = "dict"


# Classes of containers that can call their layers in order, without a program, by name.
_FOLDING: dict[str, type[ProgramModel]] = {
    "sequential": SequentialModel,
    "module_list": ModuleListModel,
    "module_dict": ModuleDictModel,
}


def _require_free_name(network: nn.Module, name: str, *, key: str, kind: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_") or hasattr(network, name):
        taken = f"{name!r}, which is an attribute of the network" if hasattr(network, name) else repr(name)
        raise config_error(key, got=f"{kind} named {taken}", expected="a valid and unused variable name")


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


# -- copies of a network with another forward --


def with_forward(network: nn.Module, name: str) -> nn.Module:
    """Return a copy of a network that runs another program or method of the network as its forward.

    The copy shares layers, parameters, buffers and hooks with the network. Do not register the copy in another module,
    because that module would then contain the parameters twice.

    Args:
        network: The network.
        name: Name of the program or of the method.

    Raises:
        AttributeError: The network has no such program or method.
    """
    method = getattr(network, name)
    view = copy.copy(network)  # a shallow copy shares the tables of layers and parameters
    view.__dict__["forward"] = method
    # Without this, the copy of a network that torch.compile has compiled would run the compiled forward.
    view.__dict__["_compiled_call_impl"] = None
    view.__dict__["forward_name"] = name
    return view


def forward_name(module: nn.Module) -> str | None:
    """Return the name that was passed to `with_forward`. Return None if `with_forward` did not create the module."""
    name = vars(module).get("forward_name")
    return name if isinstance(name, str) else None


def forward_names(network: nn.Module) -> list[str]:
    """Return the names that `with_forward` accepts.

    These are the additional programs of a YAML model, or the public methods of any other module.
    """
    if isinstance(network, ProgramModel):
        return list(network.programs)
    classes = type(network).__mro__
    own = classes[: classes.index(nn.Module)]
    names = [name for cls in own for name, value in vars(cls).items() if callable(value) and not name.startswith("_")]
    return [name for name in dict.fromkeys(names) if not hasattr(nn.Module, name)]


# -- the config key of a layer --


def config_key(network: nn.Module, path: str) -> str:
    """Return the dotted config key of a submodule.

    Args:
        network: The network.
        path: Path of the submodule in the network. Inside a layer that is not a container, the path is appended to the
            layer's key.
    """
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
    """Return the path of a submodule in the network.

    A submodule that is registered several times has several paths. Its first path is returned.

    Raises:
        KeyError: The network does not contain the submodule.
    """
    paths: dict[nn.Module, str] = {held: path for path, held in reversed(list(network.named_modules()))}
    return paths[module]
