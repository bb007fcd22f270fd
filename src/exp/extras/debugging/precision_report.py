"""python -m exp.precision [overrides]: compares the layers of a network in a precision with those in float32."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

from exp.errors import config_error
from exp.lighter_imports import pause_garbage_collection
from exp.output import command, survive_output_errors

if TYPE_CHECKING:
    from torch import Tensor, nn

    from exp.check.plan import Plan
    from exp.extras.debugging.comparison import Comparison, LayerComparison

PROGRAM = "python -m exp.precision"
HEADINGS = ("layer", "type", "dtype", "error", "gradient error", "overflow", "underflow")


@command()
def main(argv: Sequence[str]) -> int:
    """Print the comparison with float32 for the run that `python -m exp.train` would train with the same command line.

    Returns:
        Exit status: 0, or 2 if the config has errors.
    """
    # Imported here, so that `main` handles a Ctrl-C during the import of Hydra.
    from exp.cli.command_line import answer_question, parse_arguments

    arguments = parse_arguments(argv, program=PROGRAM)
    if answer_question(arguments):
        return 0
    if arguments.multirun:
        raise config_error("--multirun", got="several runs", expected="one run", fix="Leave -m out")
    from exp.check.stages import compose, refuse_early

    config = compose(arguments.overrides, config_dir=arguments.config_dir, config_name=arguments.config_name)
    refuse_early(config)
    with pause_garbage_collection():
        from exp.check.examination import plan
        from exp.check.resolution import resolve
    decided = plan(resolve(config))
    with survive_output_errors():
        print(report(decided))
    return 0


def report(plan: Plan) -> str:
    """Return the comparison of a plan's network with float32 as Markdown.

    Raises:
        ConfigError: The run has phases, a LightningModule, or no objective term that needs only one forward pass.
    """
    refuse_several(plan)
    return as_markdown(compare_plan(plan))


def refuse_several(plan: Plan) -> None:
    """Raise ConfigError if the run has phases, a LightningModule, or no objective term with only one forward pass."""
    expected = "a network of the group model, whose loss needs one forward pass"
    if plan.own is not None:
        raise config_error("module", got="a LightningModule", expected=expected)
    if plan.phases:
        raise config_error("phases", got="several losses", expected=expected)
    if not _terms(plan):
        raise config_error("objective", got="terms that need several passes", expected=expected)


def _terms(plan: Plan) -> list[str]:
    return [name for name in plan.objective.terms if not plan.objective.needs_of(name)]


def compare_plan(plan: Plan) -> Comparison:
    """Return the comparison of the plan's network with float32 on the first training batch.

    Terms of the objective that need several passes are left out.
    """
    import torch

    from exp.construct import build_network, build_starting_network
    from exp.engine.checkpoint import read_checkpoint
    from exp.engine.forward import forward_by_name
    from exp.extras.debugging.comparison import compare
    from exp.nested import map_tensors, move_tensors
    from exp.precision.plugin import build_precision
    from exp.precision.words import WORDS

    settings, device = plan.settings, torch.device(plan.placement.device(0))
    precision = settings.precision
    part = plan.objective.only(_terms(plan)).to(device)
    # Under fp64, the weights of the loss are float64, like those of the network.
    parts = part, copy.deepcopy(part).double() if WORDS[precision.word].double else part
    batch = next(iter(plan.data.loader("train", rank=0, world_size=plan.placement.data_ranks)))
    data = move_tensors(batch.data, device)

    def network() -> nn.Module:
        if settings.resume is None:
            return build_starting_network(settings, plan.spec)
        made = build_network(settings, plan.spec)
        states = read_checkpoint(settings.resume, map_location="cpu")["state_dict"]
        made.load_state_dict({name: states[f"network.{name}"] for name in made.state_dict()})
        return made

    plugin = build_precision(precision.word, device_type=device.type, keep=precision.keep, **vars(precision.scaler))
    reference, chosen = (network().to(device).train() for _ in range(2))

    def loss(network: nn.Module) -> Tensor:
        is_chosen = network is chosen
        # The data are copied, because the first layer may change its input in place.
        given = map_tensors(data, torch.clone)
        given = plugin.convert_input(given) if is_chosen else given
        values = forward_by_name(network, tuple(plan.spec.inputs))(network, given)
        total: Tensor = parts[is_chosen](values)[0]
        return total

    return compare(reference, chosen, loss=loss, precision=plugin, seed=settings.seed)


def as_markdown(comparison: Comparison) -> str:
    """Return a comparison as Markdown."""
    error = abs(comparison.loss - comparison.loss_float32)
    lines = [
        f"# precision={comparison.word} against float32, one batch",
        "",
        f"- loss {comparison.loss:.6g}, in float32 {comparison.loss_float32:.6g}, difference {error:.2g}",
    ]
    if comparison.loss_scale != 1.0:
        lines.append(f"- gradients measured at a loss scale of {comparison.loss_scale:g}")
    lines += ["", f"| {' | '.join(HEADINGS)} |", "|" + "---|" * len(HEADINGS)]
    lines += [f"| {' | '.join(_cells(layer))} |" for layer in comparison.layers]
    return "\n".join(lines)


def _cells(layer: LayerComparison) -> tuple[str, ...]:
    errors = (layer.output_error, layer.gradient_error)
    shown = [f"{error:.1e}" if error else "0" for error in errors]
    underflow = "0" if (share := f"{layer.underflow:.1%}") == "0.0%" else share
    return (layer.name, layer.kind, layer.dtype, *shown, str(layer.overflow), underflow)
