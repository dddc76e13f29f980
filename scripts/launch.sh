#!/bin/bash
# Train a recipe on the hosts of a file, over ssh. Run it in the clone, on a disk that all hosts share:
#
#   bash scripts/launch.sh HOSTFILE RECIPE CONFIG STRATEGY [flags of the recipe]
#
# HOSTFILE has a line for each host, as DeepSpeed's and MPI's: a name or address that all hosts can reach, and its number of
# processes, which must be the same on all hosts. The first host is the one that the others connect to.
#
#   10.0.0.1 slots=8
#   10.0.0.2 slots=8
#
# Variables: PORT (default 29500) must be free on the first host. SSH (default ssh) is the remote shell with its options. Those that
# begin with NCCL_, GLOO_ or TORCH_, and HF_HOME, are set on all hosts as they are set here. Others are not, so log in to the hub and to
# trackers on each host.
# Ctrl-C: the run saves a checkpoint and ends; a second one ends it at once. Each launcher leaves its ranks 10 minutes to save, or
# TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds. The end of one host's launcher with an error ends all of them.
# Status: tested with a simulated ssh; not run on real hosts.
set -euo pipefail

if (($# < 4)); then
  echo "usage: bash scripts/launch.sh HOSTFILE RECIPE CONFIG STRATEGY [flags of the recipe]" >&2
  exit 2
fi
hostfile=$1 recipe=$2 config=$3 strategy=$4
shift 4
read -r -a remote <<<"${SSH:-ssh}"
if ! command -v zerobook >/dev/null; then
  PATH=$PWD/.venv/bin:$PATH
fi
if ! command -v zerobook >/dev/null; then
  echo "zerobook is not on PATH, and there is no $PWD/.venv/bin/zerobook. Run 'make setup', or activate your environment." >&2
  exit 2
fi

hosts=() slots=""
while read -r host rest; do
  [[ -z $host || $host == \#* ]] && continue
  count=${rest#slots=}
  if [[ $rest != slots=* || ! $count =~ ^[1-9][0-9]*$ ]]; then
    echo "$hostfile: '$host $rest' is not of the form 'HOST slots=N'" >&2
    exit 2
  fi
  if [[ -n $slots && $slots != "$count" ]]; then
    echo "$hostfile: $host has $count processes and ${hosts[0]} has $slots. A launch has the same number on all hosts." >&2
    exit 2
  fi
  hosts+=("$host") slots=$count
done < <(cat "$hostfile" && echo)
if ((${#hosts[@]} == 0)); then
  echo "$hostfile: no hosts" >&2
  exit 2
fi

launchers=() terminals=() interrupted=no
stop() {
  kill "${launchers[@]}" 2>/dev/null || true
}
trap 'stop; exit 143' TERM
# shellcheck disable=SC2317 # called by the trap
interrupt() {
  interrupted=yes
  # Ctrl-C in the remote terminals. A host that has ended already reads nothing.
  for terminal in "${terminals[@]}"; do
    (trap '' PIPE && printf '\003' >&"$terminal") 2>/dev/null || true
  done
}
trap interrupt INT
# The launcher's own default of 30 seconds is too short for three steps and a save.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
# ssh passes no variables on.
settings="PATH=$(printf %q "$PATH")"
while read -r name; do
  case $name in NCCL_* | GLOO_* | TORCH_* | HF_HOME) settings+=" $name=$(printf %q "${!name}")" ;; esac
done < <(compgen -e)
pipes=$(mktemp -d)

for number in "${!hosts[@]}"; do
  words=(
    zerobook launch --config_file "$strategy" --num_machines "${#hosts[@]}" --num_processes $((${#hosts[@]} * slots))
    --machine_rank "$number" --main_process_ip "${hosts[0]}" --main_process_port "${PORT:-29500}"
    "$recipe" --config "$config" --resume_from_checkpoint auto "$@"
  )
  mkfifo "$pipes/$number"
  command="cd $(printf %q "$PWD") && $settings $(printf '%q ' "${words[@]}")"
  # -tt: the remote launcher has a terminal, and ends with this connection. Ctrl-C is for the launcher, not for the connection.
  (trap '' INT && exec "${remote[@]}" -tt "${hosts[$number]}" "$command") \
    <"$pipes/$number" > >(trap '' INT && exec sed -u "s/^/${hosts[$number]}: /") 2>&1 &
  launchers+=($!)
  exec {terminal}>"$pipes/$number"
  terminals+=("$terminal")
done
rm -r "$pipes"

code=0
while ((${#launchers[@]})); do
  sleep 0.5 || true # Ctrl-C ends it
  for number in "${!launchers[@]}"; do
    if kill -0 "${launchers[$number]}" 2>/dev/null; then
      continue
    fi
    ended=0
    wait "${launchers[$number]}" || ended=$?
    unset "launchers[$number]"
    # The others would wait for a host that has failed. After Ctrl-C, they may still save.
    if [[ $ended != 0 && $code == 0 ]]; then
      code=$ended
      [[ $interrupted == yes ]] || stop
    fi
  done
done
wait # for the output
exit "$code"
