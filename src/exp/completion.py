"""python -m exp.completion: tab completion for bash and zsh."""

from exp.cli.dispatch import run

if __name__ == "__main__":
    run("completion")
