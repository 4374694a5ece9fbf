#!/usr/bin/env bash
# End only what slurm_up.sh started: its jobs, the daemons in its pid files, its own network namespaces.
DIR=${SLURM_TEST_DIR:-/tmp/quads-slurm}; export SLURM_CONF="$DIR/slurm.conf"; RUN=""
c=$(cat "$DIR/run/slurmctld.pid" 2>/dev/null)
[ -s "$DIR/run/netns" ] && [ -n "$c" ] && kill -0 "$c" 2>/dev/null && RUN="nsenter -t $c -n -m -u --"
if [ -n "$c" ] && kill -0 "$c" 2>/dev/null; then
  ids=$($RUN squeue -h -o %A 2>/dev/null | sort -u); [ -z "$ids" ] || $RUN scancel $ids 2>/dev/null
  for _ in $(seq 75); do [ -z "$($RUN squeue -h -o %A 2>/dev/null)" ] && break; sleep 0.2; done
fi
pids=$(cat "$DIR"/run/slurmd-*.pid "$DIR/run/slurmctld.pid" "$DIR/run/munged.pid" 2>/dev/null)
for p in $pids; do kill -TERM "$p" 2>/dev/null; done
for _ in $(seq 100); do live=""; for p in $pids; do kill -0 "$p" 2>/dev/null && live="$live $p"; done; [ -z "$live" ] && break; sleep 0.1; done
for p in $live; do kill -KILL "$p" 2>/dev/null; done
[ -s "$DIR/run/netns" ] && while read -r n; do ip netns del "$n"; done < "$DIR/run/netns"
rm -f "$DIR"/run/*.pid "$DIR/run/netns"; exit 0
