#!/usr/bin/env bash
# Stops the nodes that cluster/start.sh started under FOLDER; their data stays.
#
#   cluster/stop.sh FOLDER
set -euo pipefail

folder=$(cd "${1:?usage: cluster/stop.sh FOLDER}" && pwd)
stop_limit_s=25

# Prints the id of the node's process if the id in its pid file is still valid. Returns 1 otherwise.
pid_of() {
  local pid
  { pid=$(cat "$1/pid") && tr '\0' ' ' <"/proc/$pid/cmdline" | grep -qF "$1/rapidraid.toml"; } 2>/dev/null || return 1
  echo "$pid"
}

for node in "$folder"/nodes/*/; do
  if pid=$(pid_of "${node%/}"); then kill -TERM "$pid" 2>/dev/null || true; fi
done
deadline=$((SECONDS + stop_limit_s))
for node in "$folder"/nodes/*/; do
  node=${node%/}
  while pid=$(pid_of "$node"); do
    if ((SECONDS > deadline)); then
      echo "$(basename "$node") does not stop in order and is killed; nothing that was acknowledged is lost" >&2
      kill -KILL "$pid" 2>/dev/null || true
    fi
    sleep 0.05
  done
  rm -f "$node/pid"
done
