#!/bin/sh
# Wait until the stopping processes of a run need Redis no longer. The chart runs this before it stops Redis.
#
# usage: wait-for-clients.sh RUN LIMIT_S [options of redis-cli ...]
#
# Processes that got SIGTERM are in the sorted set penstock:{RUN}:leaving, by the time of their last sign in ms
# (penstock/store/heartbeats.py). Kubernetes may stop them some seconds after Redis, so the script waits for them for
# SETTLE_S (15). If Redis is stopped alone, as by a node that is drained, no client comes and Redis is stopped then. Redis
# answers all the time. A sign that is older than LOST_S (30) is that of a process which was killed.
set -u
run=$1 limit=$2
shift 2
settle=${SETTLE_S:-15} lost=${LOST_S:-30} waited=0

# The user probe needs no password and may only ping, and count the names. A user without a password still has to name one.
ask() { REDISCLI_AUTH=none redis-cli --user probe --no-auth-warning "$@"; }

while [ "$waited" -lt "$limit" ]; do
  now=$(ask "$@" TIME | head -n 1)
  case $now in '' | *[!0-9]*) exit 0 ;; esac # Redis does not answer: there is nothing to wait for.
  leaving=$(ask "$@" ZCOUNT "penstock:{$run}:leaving" $(((now - lost) * 1000)) +inf)
  if [ "${leaving:-0}" = 0 ] && [ "$waited" -ge "$settle" ]; then exit 0; fi
  sleep 1
  waited=$((waited + 1))
done
echo "wait-for-clients.sh: $leaving processes of run $run are still stopping after $limit s; Redis stops now" >&2
