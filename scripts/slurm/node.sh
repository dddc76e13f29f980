#!/bin/bash
# Start the ranks of this node. scripts/slurm/train.sbatch starts it once on every node.
#
# A warning (SIGUSR1) is sent on to the ranks until they end: they save a checkpoint. Then the launcher is ended, so that it
# does not start them again. Slurm may signal all processes of a task, so the launcher ignores SIGUSR1, and so do ranks that
# have not begun to train.
set -euo pipefail

recipe=$1 config=$2 strategy=$3
shift 3
gpus=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)
processes=${PROCESSES_PER_NODE:-$((gpus > 0 ? gpus : 1))}

# a node that comes back would wait without end for a store that agents and ranks share (torch 2.13)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
trap '' USR1 # inherited by the launcher
accelerate launch --config_file "$strategy" \
  --num_machines "$SLURM_NNODES" --num_processes $((SLURM_NNODES * processes)) --machine_rank "$SLURM_NODEID" \
  --main_process_ip "$MAIN_HOST" --main_process_port "$MAIN_PORT" --rdzv_backend c10d --max_restarts 3 \
  "$recipe" --config "$config" --resume_from_checkpoint auto "$@" &
launcher=$!

# shellcheck disable=SC2317 # called by the trap
warn() {
  trap '' USR1
  mapfile -t ranks < <(pgrep --parent "$launcher")
  {
    for rank in "${ranks[@]}"; do
      while kill -USR1 "$rank" 2>/dev/null; do sleep 1; done
    done
    kill -TERM "$launcher" 2>/dev/null || true
  } &
}
trap warn USR1

code=0
wait "$launcher" || code=$?
while kill -0 "$launcher" 2>/dev/null; do # a signal ends `wait`, and not the launcher
  code=0
  wait "$launcher" || code=$?
done
exit "$code"
