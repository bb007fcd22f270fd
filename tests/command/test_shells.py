"""Tab completion in bash, with the script that users install."""

import os
import subprocess

import pytest

# Commands that bash runs at the tab key, after a line without quotes.
TAB = """
eval "$(exp completion bash)"
COMP_LINE=$1 COMP_POINT=${#1}
read -ra COMP_WORDS <<< "$1"
[[ "$(complete -p exp)" =~ -F\\ ([^ ]+) ]]
"${BASH_REMATCH[1]}" "$3" "$2"
echo "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("line", "word", "completed"),
    [
        ("exp tr", "tr", "train"),
        ("exp train model=le", "le", "lenet"),
        ("exp train trainer.max_ep", "trainer.max_ep", "trainer.max_epochs="),
        # A file in the folder that tab must not run.
        ("./exp tr", "tr", ""),
    ],
)
def test_a_tab_completes_the_line(line, word, completed, scripts, tmp_path):
    (tmp_path / "exp").write_text("#!/bin/sh\necho train\n")
    (tmp_path / "exp").chmod(0o755)
    # A module that exp must not import.
    (tmp_path / "json.py").write_text("raise SystemExit('the folder was imported')")
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-c", TAB, "bash", line, word, line.partition(" ")[0]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=True)
    assert done.stdout == f"{completed}\n"
