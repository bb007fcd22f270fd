"""What a run does not use is not imported, and what does use it finds it as ever.

Each program is a process of its own: what this one has imported would hide it.
"""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from exp.lighter_imports import ASKING

# Half of the seconds of `import torch, lightning`, and what else a run on digits has no use for.
UNUSED = (
    *("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.onnx", "sympy"),
    *("scipy.signal", "scipy.stats", "sklearn", "pandas", "matplotlib", "tensorboard.backend", "optuna", "onnx"),
)


def said(program: str, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_runs_with_the_default_hooks_import_nothing_that_they_do_not_use(tmp_path):
    (tmp_path / "text.txt").write_text("to be, or not to be, that is the question. " * 200)
    program = """
        import sys
        from exp.train import main
        short = ["trainer.max_epochs=null", "trainer.max_steps=2", "trainer.limit_val_batches=1", "test=false"]
        text = ["model=gpt", "data=text", "data.dataset.files=text.txt"]
        for words in (["model=lenet"], ["model=resnet", "precision=bf16"], ["model=rnn"], text):
            assert main([*words, *short]) == 0
        print([name for name in sys.argv[1:] if name in sys.modules])
    """
    assert said(program, *UNUSED, cwd=tmp_path) == "[]"


def test_without_the_stand_ins_all_of_them_would_be_imported(tmp_path):
    # Where this fails, another version of torch, Lightning or torchmetrics asks no more: that stand-in can go.
    program = """
        import sys
        import torch, lightning.pytorch, torchmetrics
        torch.optim.SGD([torch.ones(1, requires_grad=True)]).step()
        torch.nn.functional.layer_norm(torch.ones(2, 3, device="meta", requires_grad=True), [3]).sum().backward()
        print([name for name in sys.argv[1:] if name in sys.modules])
    """
    assert said(program, *ASKING, cwd=tmp_path) == str([*ASKING])
    assert said(f"import exp\n{textwrap.dedent(program)}", *ASKING, cwd=tmp_path) == "[]"


def test_once_torch_compiles_what_is_not_to_be_compiled_is_not(tmp_path):
    program = """
        import exp, torch, lightning.pytorch
        from lightning.fabric.wrappers import _unwrap_compiled

        parameter = torch.ones(3, requires_grad=True)
        optimizer = torch.optim.SGD([parameter], lr=0.5)  # its add_param_group is not to be compiled
        parameter.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen = []

        @torch.compiler.disable
        def plain(x):
            seen.append(torch.compiler.is_compiling())
            return x * 2

        plain(torch.ones(1))

        def backend(graph, inputs):
            seen.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
            return graph.forward

        network = torch.nn.Linear(3, 1)
        compiled = torch.compile(network, backend=backend)
        whole = torch.compile(lambda x: plain(x + 1) - 1, backend=backend)
        whole(torch.ones(1))
        assert seen[0] is False and False in seen[1:] and True not in seen, seen
        assert all("mul" not in str(graph) for graph in seen[1:]), seen
        assert _unwrap_compiled(compiled)[0] is network
        assert not isinstance(network, type(compiled))
        step = torch.compile(optimizer.step, backend=backend)
        (parameter * 3).sum().backward()
        step()
        print(parameter.tolist())
    """
    assert said(program, cwd=tmp_path) == "[-1.0, -1.0, -1.0]"


def test_shapes_with_symbols_are_checked_as_ever(tmp_path):
    program = """
        import exp, torch
        x = torch.ones(4, 3, device="meta", requires_grad=True)
        layer = torch.nn.Sequential(torch.nn.Conv1d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(2, 5)).to("meta")
        layer(x.unsqueeze(1))[:, 1:].logsumexp(1).sum().backward()  # by what stands in
        told = []
        for wrong in (lambda: torch.mm(x, x), lambda: x.expand(3, 3), lambda: torch.cat([x, x.T]), lambda: x.view(5)):
            try:
                wrong()
            except RuntimeError as error:
                told.append(str(error).splitlines()[0])
        from torch.fx.experimental.proxy_tensor import make_fx
        traced = make_fx(lambda x: (x @ x.T)[:, :2].logsumexp(1), tracing_mode="symbolic")(torch.ones(4, 3))
        given, *_, last = (node.meta["val"].shape for node in traced.graph.nodes if "val" in node.meta)
        assert type(last[0]) is torch.SymInt and str(last[0]) == str(given[0]), (given, last)
        print(len(told), told)
    """
    plain = said(program.replace("import exp, torch", "import torch"), cwd=tmp_path)
    assert plain.startswith("4 ")
    assert said(program, cwd=tmp_path) == plain


def test_a_metric_is_plotted(tmp_path):
    pytest.importorskip("matplotlib")
    program = """
        import exp, torch, torchmetrics, matplotlib
        matplotlib.use("agg")
        metric = torchmetrics.MeanMetric()
        metric.update(3.0)
        figure, axes = metric.plot()
        matrix = torchmetrics.ConfusionMatrix(task="multiclass", num_classes=3)
        matrix.update(torch.arange(3), torch.arange(3))
        heat, axis = matrix.plot()
        again = metric.plot(ax=axes)
        print([type(one).__name__ for one in (figure, axes, heat, axis)])
    """
    assert said(program, cwd=tmp_path) == "['Figure', 'Axes', 'Figure', 'Axes']"
