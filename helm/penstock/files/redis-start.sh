#!/bin/sh
# Start Redis with the users of users.acl and the passwords of a folder.
#
# usage: start.sh USERS_ACL FOLDER PASSWORDS [redis.conf lines as --options ...]
#
# users.acl holds the rights of each user and no password; no one can log in before this script adds one. It writes a copy
# with the SHA-256 of each password to FOLDER. PASSWORDS holds the files redis-gateway-password, redis-rollout-password and
# redis-learner-password, and may hold redis-operator-password, for the user of `penstock queue`. A password may contain any
# character except line ends, and must not begin or end with a blank. It is never put on a command line.
# (These comments are here because Redis' ACL files allow none.)
#
# environment: REDIS_SERVER names the binary, REDIS_DATA its data folder (/data).
set -eu
umask 077
users=$1 folder=$2 passwords=$3
shift 3

hash_of() {
  if [ ! -s "$passwords/redis-$1-password" ]; then
    echo "start.sh: error: $passwords/redis-$1-password is missing or empty; give every user a password" >&2
    exit 2
  fi
  # Clients strip line ends from the file, too. printf is built into the shell: it starts no process.
  printf %s "$(cat "$passwords/redis-$1-password")" | sha256sum | cut -d' ' -f1
}

gateway=$(hash_of gateway)
rollout=$(hash_of rollout)
learner=$(hash_of learner)
operator=''
if [ -s "$passwords/redis-operator-password" ]; then operator="#$(hash_of operator)"; fi

sed -e "s/^user gateway on resetpass/& #$gateway/" \
  -e "s/^user rollout on resetpass/& #$rollout/" \
  -e "s/^user learner on resetpass/& #$learner/" \
  -e "s/^user operator on resetpass/& $operator/" "$users" >"$folder/users.acl"

# If a crash cut the append-only file inside a transaction, repair it before Redis reads it. Otherwise Redis would append the
# next transactions to the torn one, and replay a mixture of them at the following start.
for log in "${REDIS_DATA:-/data}/appendonlydir/appendonly.aof.manifest" "${REDIS_DATA:-/data}/appendonly.aof"; do
  if [ -f "$log" ] && command -v redis-check-aof >/dev/null 2>&1; then
    yes | redis-check-aof --fix "$log" >&2
  fi
done

# Redis searches small sorted sets and hashes from end to end, up to 128 entries by default. A batch of 64 groups searches
# each of the queue's 64 times.
exec "${REDIS_SERVER:-redis-server}" --aclfile "$folder/users.acl" \
  --zset-max-ziplist-entries 0 --hash-max-ziplist-entries 16 "$@"
