#!/bin/sh
# Start Redis with the users of users.acl and the passwords of the environment.
#
# users.acl holds rights only: its users are on, and without a password nobody can log in as one of them. Each gets the
# SHA-256 of its variable here, so no password is on a command line or in a file. Redis' own ACL files allow no comments.
#
# usage: start.sh USERS_ACL FOLDER [redis.conf lines as --options ...]
# environment: GATEWAY_PASSWORD, ROLLOUT_PASSWORD, LEARNER_PASSWORD; OPERATOR_PASSWORD, without which nobody is let in as
# the user of `penstock queue`; REDIS_SERVER names the binary, REDIS_DATA its folder.
set -eu
umask 077
users=$1 folder=$2
shift 2

hash_of() {
  if [ -z "$2" ]; then
    echo "start.sh: error: $1 is empty; give every role a password" >&2
    exit 2
  fi
  printf %s "$2" | sha256sum | cut -d' ' -f1
}

gateway=$(hash_of GATEWAY_PASSWORD "${GATEWAY_PASSWORD:-}")
rollout=$(hash_of ROLLOUT_PASSWORD "${ROLLOUT_PASSWORD:-}")
learner=$(hash_of LEARNER_PASSWORD "${LEARNER_PASSWORD:-}")
operator=''
if [ -n "${OPERATOR_PASSWORD:-}" ]; then operator="#$(hash_of OPERATOR_PASSWORD "$OPERATOR_PASSWORD")"; fi
unset GATEWAY_PASSWORD ROLLOUT_PASSWORD LEARNER_PASSWORD OPERATOR_PASSWORD

sed -e "s/^user gateway on resetpass/& #$gateway/" \
  -e "s/^user rollout on resetpass/& #$rollout/" \
  -e "s/^user learner on resetpass/& #$learner/" \
  -e "s/^user operator on resetpass/& $operator/" "$users" >"$folder/users.acl"

# A log that a crash cut inside a transaction must be repaired before Redis reads it: it would accept the next ones as
# part of the torn one, and replay a mixture at the start after.
for log in "${REDIS_DATA:-/data}/appendonlydir/appendonly.aof.manifest" "${REDIS_DATA:-/data}/appendonly.aof"; do
  if [ -f "$log" ] && command -v redis-check-aof >/dev/null 2>&1; then
    yes | redis-check-aof --fix "$log" >&2
  fi
done

exec "${REDIS_SERVER:-redis-server}" --aclfile "$folder/users.acl" "$@"
