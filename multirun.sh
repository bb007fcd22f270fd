#!/usr/bin/env bash
# Three ways to run many jobs. Each trains small networks on the digits for about ten seconds on two cores:
#
#   ./multirun.sh            a grid: every combination of three learning rates and two seeds
#   ./multirun.sh search     a search: 12 trials sample a learning rate and a width; trials with a worse loss are pruned
#   ./multirun.sh repeats    repeats: two learning rates with three seeds each, compared by their means over the seeds
#
# Further overrides on the command line take precedence, because the last override of a key counts:
#
#   ./multirun.sh seed=0,1,2
#   ./multirun.sh search sweep.trials=30 trainer.max_epochs=20
#   ./multirun.sh repeats 'hooks=[gradients]' optimizer=sgd
#
# A search needs Optuna: pip install -e '.[search]'. The pictures of python -m exp.report need '.[report]'.
#
# exp checks all jobs before it starts the first one. The results are in outputs/lr_search/sweeps/<date>/<time>/:
# table.md, and one run directory per job. See docs/sweeps.md.
set -euo pipefail

# Use the .venv of this checkout if it exists, otherwise the active python.
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
