"""python -m exp.export: a saved network for other programs, such as ONNX."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("export")
