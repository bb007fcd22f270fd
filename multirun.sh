#!/usr/bin/env bash
# Three ways to run many jobs, small networks on the digits, each in ten seconds or so on two cores:
#
#   ./multirun.sh            a grid: every combination of three learning rates and two seeds
#   ./multirun.sh search     a search: 12 trials draw a learning rate and a width; those that fall behind are pruned
#   ./multirun.sh repeats    repeats: two learning rates by three seeds, compared by their means over the seeds
#
# Whatever you type behind it wins, for the last of two equal keys counts:
#
#   ./multirun.sh seed=0,1,2
#   ./multirun.sh search sweep.trials=30 trainer.max_epochs=20
#   ./multirun.sh repeats 'hooks=[gradients]' optimizer=sgd
#
# A search needs Optuna: pip install -e '.[search]', and the pictures of python -m exp.report '.[report]'.
#
# Every job is checked before the first one starts. Results: outputs/lr_search/sweeps/<date>/<time>/table.md, and one
# directory a job beside it. docs/sweeps.md says more.
set -euo pipefail

# The environment of this checkout where it stands, else whatever python is active.
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="$here/.venv/bin/python"
[ -x "$python" ] || python=python

way=grid
case "${1:-}" in grid | search | repeats) way="$1" && shift ;; esac
case "$way" in
    grid) jobs=(optimizer.lr=1e-3,3e-3,1e-2 seed=0,1) ;;
    search) jobs=('optimizer.lr=tag(log,interval(1e-4,1e-1))' 'model.constants.width=int(interval(8,64))' model=mlp sweep.trials=12 sweep.pruner=median) ;;
    repeats) jobs=(optimizer.lr=1e-3,1e-2 seed=0,1,2 sweep.repeat_over=seed) ;;
esac

exec "$python" -m exp.train -m name=lr_search trainer.max_epochs=10 "${jobs[@]}" "$@"
