#!/bin/sh
# Make the keys and passwords of the compose files in secrets/, next to this script. Files that exist are kept.
set -eu
umask 077
cd "$(dirname "$0")"
mkdir -p secrets
chmod 700 secrets
for name in api-key cluster-key redis-gateway-password redis-rollout-password redis-learner-password redis-operator-password; do
  if [ ! -s "secrets/$name" ]; then
    od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n' >"secrets/.$name"
    # The users of the containers read the files; the mode of the folder keeps other users of this machine out.
    chmod 644 "secrets/.$name"
    mv "secrets/.$name" "secrets/$name"
  fi
done
