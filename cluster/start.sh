#!/usr/bin/env bash
# Starts nodes on this machine under FOLDER, each in its own process. Creates their files the first
# time.
#
#   cluster/start.sh FOLDER [NODES]
#
# NODES is the number of nodes (default: 16); an existing folder keeps its nodes. RAPIDRAID is the
# program (default: this repository's release build, else the one on the PATH). PORT is the first of
# the UDP ports on 127.0.0.1 (default: 7440). cluster/stop.sh FOLDER stops the nodes.
set -euo pipefail

folder=${1:?usage: cluster/start.sh FOLDER [NODES]}
port=${PORT:-7440}
nodes=${2:-16}
ready_limit_s=30

if [[ ! $nodes =~ ^[1-9][0-9]{0,2}$ ]]; then
  echo "the number of nodes is $nodes: give 1 to 999" >&2
  exit 2
fi

here=$(cd "$(dirname "$0")/.." && pwd)
program=${RAPIDRAID:-$here/target/release/rapidraid}
if [[ ! -x $program ]] && ! program=$(command -v rapidraid); then
  echo "there is no rapidraid: cargo build --release, or set RAPIDRAID" >&2
  exit 1
fi

if [[ ! -e $folder/client/rapidraid.toml ]]; then
  arguments=()
  for ((i = 0; i < nodes; i++)); do
    arguments+=(--node "$(printf 'node-%02d=127.0.0.1:%d' $((i + 1)) $((port + i)))")
  done
  "$program" cluster init "$folder" "${arguments[@]}" --set memory=64MiB >/dev/null
fi
folder=$(cd "$folder" && pwd)

# Returns whether the process id in the pid file is still that of the node's process.
is_running() {
  local pid
  { pid=$(cat "$1/pid") && tr '\0' ' ' <"/proc/$pid/cmdline" | grep -qF "$1/rapidraid.toml"; } 2>/dev/null
}

for node in "$folder"/nodes/*/; do
  node=${node%/}
  if is_running "$node"; then continue; fi
  nohup "$program" node --config "$node/rapidraid.toml" >/dev/null 2>"$node/log" </dev/null &
  echo $! >"$node/pid"
done

deadline=$((SECONDS + ready_limit_s))
for node in "$folder"/nodes/*/; do
  node=${node%/}
  until grep -q '^ready: ' "$node/log"; do
    if ! is_running "$node" || ((SECONDS > deadline)); then
      echo "$(basename "$node") did not start; the end of $node/log:" >&2
      tail -n 5 "$node/log" >&2
      exit 1
    fi
    sleep 0.05
  done
done

# A save uses the code for which enough nodes are registered, so wait for the registrations too.
count=$(find "$folder/nodes" -mindepth 1 -maxdepth 1 -type d | wc -l)
until "$program" status --config "$folder/client/rapidraid.toml" | grep -q "^$count of $count nodes live"; do
  if ((SECONDS > deadline)); then
    echo "the nodes run, but not all of them are registered; \`$program status\` shows which" >&2
    exit 1
  fi
  sleep 0.2
done

echo "$count nodes run. Now:"
echo "  export RAPIDRAID_CONFIG=$folder/client/rapidraid.toml"
echo "  $program status"
