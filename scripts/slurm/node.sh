#!/bin/bash
# Start the ranks of this node, and end with their exit code. scripts/slurm/train.sbatch starts it once on every node.
#
# A warning (SIGUSR1, or SIGTERM of scancel and of preemption) is sent on to the ranks as SIGUSR1 until they end: they save a
# checkpoint. Slurm signals this script alone (proctrack/cgroup) or all processes of the task (proctrack/linuxproc), so the
# launcher ignores SIGUSR1, and so do ranks that have not begun to train.
set -euo pipefail

recipe=$1 config=$2 strategy=$3
shift 3

# A node may not have the environment of the shell that submitted the job.
if ! command -v zerobook >/dev/null; then
  PATH=$PWD/.venv/bin:$PATH
fi
if ! command -v zerobook >/dev/null; then
  echo "$HOSTNAME: zerobook is not on PATH, and there is no $PWD/.venv/bin/zerobook." \
    "Run 'make setup' in the clone, or activate your environment before sbatch." >&2
  exit 2
fi

# One process a GPU of the job: Slurm names those in CUDA_VISIBLE_DEVICES, and nvidia-smi may list others of the node, too. Below a
# GPU, nvidia-smi lists its MIG instances. Those are not counted: CUDA gives a process one of them, and NCCL joins none.
if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
  gpus=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -cE '^(GPU-|[0-9])' || true)
else
  gpus=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | grep -c '^GPU ' || true)
fi
processes=${PROCESSES_PER_NODE:-$((gpus > 0 ? gpus : 1))}

trap '' USR1 # inherited by the launcher
# torchrun would kill ranks that save after 30 seconds. Ranks that hang in their driver keep the launcher several times as long.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
zerobook launch --config_file "$strategy" \
  --num_machines "$SLURM_NNODES" --num_processes $((SLURM_NNODES * processes)) --machine_rank "$SLURM_NODEID" \
  --main_process_ip "$MAIN_HOST" --main_process_port "$MAIN_PORT" \
  "$recipe" --config "$config" --resume_from_checkpoint auto "$@" &
launcher=$!

# shellcheck disable=SC2317 # called by the trap
warn() {
  trap '' USR1 TERM
  while kill -0 "$launcher" 2>/dev/null; do
    pkill -USR1 --parent "$launcher" || true
    sleep 1
  done &
}
trap warn USR1 TERM

code=0
wait "$launcher" || code=$?
while kill -0 "$launcher" 2>/dev/null; do # a signal ends `wait`, and not the launcher
  code=0
  wait "$launcher" || code=$?
done
exit "$code"
