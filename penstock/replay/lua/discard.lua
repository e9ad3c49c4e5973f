-- ARGV: term, id, reason. Drops a queued group for good. Its prompt is forgotten, so another one can be admitted.
local fenced = check_term(ARGV[1])
if fenced then return fenced end
check_prompts({ARGV[2]}, '')
check('HLEN', MANIFESTS)
numbers(EXPIRED_REASONS, label_of(ARGV[3]))
local payload_key = remove_group(ARGV[2])
if not payload_key then return 0 end
redis.call('UNLINK', payload_key)
forget_prompts({ARGV[2]})
count('expired', 1)
count('discarded', 1)
redis.call('HINCRBY', EXPIRED_REASONS, label_of(ARGV[3]), 1)
return 1
