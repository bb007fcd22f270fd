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
    *("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.onnx"),
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


def test_what_is_not_to_be_compiled_stays_what_it_is(tmp_path):
    program = """
        import exp, gc, sys, torch, weakref

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.body = torch.compiler.disable(torch.nn.Linear(4, 4))
                self.head = torch.nn.Linear(4, 2)
        names = sorted(Net().state_dict())

        class Attending(torch.nn.Linear):
            def __init__(self):
                super().__init__(4, 4)
                self.attend = torch.compiler.disable(self.attend)
            def attend(self, x):
                return x
        gone = weakref.ref(Attending())
        gc.collect()
        print(names, gone())
    """
    names = ["body._orig_mod.bias", "body._orig_mod.weight", "head.bias", "head.weight"]
    assert said(program, cwd=tmp_path) == f"{names} None"


def test_what_torch_s_compiler_would_have_brought_is_there(tmp_path):
    program = """
        import exp, importlib.util, torch, lightning.pytorch
        assert importlib.util.find_spec("torchmetrics").loader.is_package("torchmetrics")
        import torchmetrics.audio, scipy.signal
        found = torch.distributed.tensor.DTensor, torch.distributed.fsdp.fully_shard, torch.distributed.nn.functional
        torch.fx.experimental.symbolic_shapes.ShapeEnv()
        print(hasattr(torch.distributed, "tensors"), scipy.signal.hamming(3).round(9).tolist() == [0.08, 1.0, 0.08])
    """
    assert said(program, cwd=tmp_path) == "False True"


def test_a_finder_that_was_there_before_hears_of_all_modules(tmp_path):
    program = """
        import sys
        heard = []
        class Hears:
            def find_spec(self, name, path=None, target=None):
                heard.append(name)
        sys.meta_path.insert(0, Hears())
        import exp, torch, torchmetrics
        print({"torch._compile", "torch.optim.optimizer", "torchmetrics"} <= set(heard))
    """
    assert said(program, cwd=tmp_path) == "True"


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
