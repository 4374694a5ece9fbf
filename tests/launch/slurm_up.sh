#!/usr/bin/env bash
# Start a real SLURM "cluster" of N virtual nodes on this one host; everything lives under $SLURM_TEST_DIR.
#   SLURM_TEST_NODES=4  nodes        SLURM_TEST_CPUS=8  CPUs declared a node     SLURM_TEST_GPUS=0  fake GPUs a node
#   SLURM_TEST_NETNS=0  0: slurmd -N nodeX on 127.0.0.1, one port each (no privilege, hostname shared)
#                       1: each node in its own network+UTS+mount namespace: own IP, own hostname, own port space (root)
# Prints on stdout the lines to eval; run commands through $SLURM_RUN (empty in loopback mode).
set -euo pipefail
DIR=${SLURM_TEST_DIR:-/tmp/quads-slurm}; NODES=${SLURM_TEST_NODES:-4}; CPUS=${SLURM_TEST_CPUS:-8}
GPUS=${SLURM_TEST_GPUS:-0}; BASE=${SLURM_TEST_PORT:-17000}; NETNS=${SLURM_TEST_NETNS:-0}
TAG=${SLURM_TEST_TAG:-hq}; NET=${SLURM_TEST_NET:-10.77.0}
log(){ echo "[slurm_up] $*" >&2; }; now(){ date +%s.%N; }; T0=$(now)
for b in munged slurmctld slurmd sbatch; do command -v $b >/dev/null || { log "missing $b: apt-get install --no-install-recommends slurm-wlm munge iproute2"; exit 2; }; done
[ ! -s "$DIR/run/slurmctld.pid" ] || ! kill -0 "$(cat "$DIR/run/slurmctld.pid")" 2>/dev/null || { log "already up in $DIR"; exit 3; }
trap 'rc=$?; [ $rc -eq 0 ] || { log "failed rc=$rc; cleaning"; SLURM_TEST_DIR=$DIR "$(dirname "$0")/slurm_down.sh"; }' EXIT
mkdir -p "$DIR"/{run,log,state,spool}; chmod 755 "$DIR" "$DIR"/*
rm -rf "$DIR"/state/* "$DIR"/spool/*; : > "$DIR/gres.conf"; printf 'CgroupAutomount=no\n' > "$DIR/cgroup.conf"
ME=$(id -un)
[ -s "$DIR/munge.key" ] || { (umask 077; head -c 128 /dev/urandom > "$DIR/munge.key"); }
munged --force --key-file="$DIR/munge.key" --socket="$DIR/run/munge.sock" --pid-file="$DIR/run/munged.pid" \
       --log-file="$DIR/log/munged.log" --seed-file="$DIR/run/munge.seed" --num-threads=2 2>>"$DIR/log/munged.err"
if [ "$NETNS" = 1 ]; then CTL=ctl; CTLADDR=$NET.1; else CTL=$(hostname -s); CTLADDR=127.0.0.1; fi
GRES_LINE=""; NODE_GRES=""
if [ "$GPUS" -gt 0 ]; then
  GRES_LINE="GresTypes=gpu"; NODE_GRES="Gres=gpu:$GPUS"
  for i in $(seq 0 $((GPUS-1))); do rm -f "$DIR/fakegpu$i"; mknod "$DIR/fakegpu$i" c 1 3; done  # slurmd wants device nodes; these are /dev/null
  echo "Name=gpu File=$DIR/fakegpu[0-$((GPUS-1))]" > "$DIR/gres.conf"
fi
cat > "$DIR/slurm.conf" <<CONF
ClusterName=quads_test
SlurmctldHost=$CTL($CTLADDR)
SlurmctldPort=$BASE
AuthType=auth/munge
AuthInfo=socket=$DIR/run/munge.sock,cred_expire=${SLURM_TEST_CRED_EXPIRE:-5}
CredType=cred/munge
SlurmUser=$ME
SlurmdUser=$ME
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/run/slurmctld.pid
SlurmdPidFile=$DIR/run/slurmd-%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$DIR/log/jobcomp.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,bf_continue
SlurmdParameters=config_overrides
SlurmdTimeout=${SLURM_TEST_SLURMD_TIMEOUT:-10}
ReturnToService=2
MpiDefault=none
KillWait=5
MinJobAge=3600
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
MailProg=/bin/true
$GRES_LINE
CONF
for i in $(seq 0 $((NODES-1))); do
  if [ "$NETNS" = 1 ]; then W="NodeHostname=node$i NodeAddr=$NET.$((10+i)) Port=$((BASE+10))"
  else W="NodeHostname=$CTL NodeAddr=127.0.0.1 Port=$((BASE+10+i))"; fi
  echo "NodeName=node$i $W CPUs=$CPUS RealMemory=2000 $NODE_GRES State=UNKNOWN"
done >> "$DIR/slurm.conf"
cat >> "$DIR/slurm.conf" <<CONF
PartitionName=batch Nodes=ALL Default=YES MaxTime=60 DefaultTime=10 State=UP PriorityTier=1 OverSubscribe=NO GraceTime=${SLURM_TEST_GRACE:-15}
PartitionName=urgent Nodes=ALL MaxTime=60 DefaultTime=10 State=UP PriorityTier=10 OverSubscribe=NO PreemptMode=OFF
CONF
export SLURM_CONF="$DIR/slurm.conf"; RUN=""
if [ "$NETNS" = 1 ]; then
  { echo "127.0.0.1 localhost"; echo "$NET.1 ctl"; for i in $(seq 0 $((NODES-1))); do echo "$NET.$((10+i)) node$i"; done; } > "$DIR/hosts"
  : > "$DIR/run/netns"
  mk(){ ip netns add "$1"; echo "$1" >> "$DIR/run/netns"; ip -n "$1" link set lo up; }
  inside(){ local ns=$1 host=$2; shift 2   # not "ip netns exec": that remounts /sys and hides /sys/fs/cgroup, which slurmd needs
    nsenter --net="/var/run/netns/$ns" unshare --mount --uts bash -c 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"' _ "$DIR/hosts" "$host" "$@"; }
  mk ${TAG}ctl; ip -n ${TAG}ctl link add br0 type bridge; ip -n ${TAG}ctl addr add $NET.1/24 dev br0; ip -n ${TAG}ctl link set br0 up
  for i in $(seq 0 $((NODES-1))); do
    n=$TAG$i; mk $n
    ip -n ${TAG}ctl link add v$i type veth peer name eth0 netns $n
    ip -n ${TAG}ctl link set v$i master br0 up; ip -n $n addr add $NET.$((10+i))/24 dev eth0; ip -n $n link set eth0 up
  done
  inside ${TAG}ctl ctl slurmctld -c
  for i in $(seq 0 $((NODES-1))); do mkdir -p "$DIR/spool/node$i"; inside $TAG$i node$i slurmd -N node$i -c; done
  for _ in $(seq 50); do [ -s "$DIR/run/slurmctld.pid" ] && break; sleep 0.1; done
  printf '#!/bin/sh\nexec nsenter -t %s -n -m -u --wd="$PWD" -- "$@"\n' "$(cat "$DIR/run/slurmctld.pid")" > "$DIR/run/on_ctl"
  chmod +x "$DIR/run/on_ctl"; RUN="$DIR/run/on_ctl"
else
  slurmctld -c; for i in $(seq 0 $((NODES-1))); do mkdir -p "$DIR/spool/node$i"; slurmd -N node$i -c; done
fi
for _ in $(seq 200); do
  up=$($RUN sinfo -h -t idle -p batch -N -o %N 2>/dev/null | sort -u | wc -l) || up=0
  [ "$up" -eq "$NODES" ] && break; sleep 0.1
done
[ "${up:-0}" -eq "$NODES" ] || { log "only ${up:-0} of $NODES nodes idle"; $RUN sinfo >&2 || true; tail -n 20 "$DIR"/log/*.log >&2; exit 1; }
log "$NODES nodes idle after $(awk "BEGIN{print $(now)-$T0}") s (netns=$NETNS gpus=$GPUS)"
echo "export SLURM_CONF='$DIR/slurm.conf' SLURM_TEST_DIR='$DIR' SLURM_RUN='$RUN'"
