#!/usr/bin/env bash
# An example sweep: three learning rates by two seeds, six small networks on the digits, a minute or two on two cores.
#
#   ./multirun.sh                                         as it stands
#   ./multirun.sh seed=0,1,2 model=mlp                    your values win: the last of two equal keys counts
#   ./multirun.sh 'hooks=[gradients]' trainer.max_epochs=5
#
# Every job is checked before the first one starts. Results: outputs/lr_search/sweeps/<date>/<time>/table.md, one directory
# a job beside it, and all curves with `python -m exp.dashboard` of that directory.
set -euo pipefail

# The environment of this checkout where it stands, else whatever python is active.
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="$here/.venv/bin/python"
[ -x "$python" ] || python=python

exec "$python" -m exp.train -m \
    name=lr_search \
    optimizer.lr=1e-3,3e-3,1e-2 \
    seed=0,1 \
    trainer.max_epochs=10 \
    "$@"
