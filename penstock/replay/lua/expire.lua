-- ARGV: term, id, reason. Drops a queued group and makes its prompt pending, to be admitted again.
local fenced = check_term(ARGV[1])
if fenced then return fenced end
check_prompts({ARGV[2]}, '')
check('HLEN', MANIFESTS)
numbers(EXPIRED_REASONS, label_of(ARGV[3]))
local payload_key = remove_group(ARGV[2])
if not payload_key then return 0 end
redis.call('UNLINK', payload_key)
-- A higher attempt tells a producer that still holds the group in its outbox that the group is not wanted.
redis.call('HINCRBY', ATTEMPTS, ARGV[2], 1)
count('expired', 1)
redis.call('HINCRBY', EXPIRED_REASONS, label_of(ARGV[3]), 1)
make_pending(ARGV[2])
return 1
