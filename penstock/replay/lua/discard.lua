-- ARGV: term, id, reason. Drops a queued group for good. Its prompt is forgotten, so another one can be admitted.
local fenced = check_term(ARGV[1])
if fenced then return fenced end
local payload_key = remove_group(ARGV[2])
if not payload_key then return 0 end
redis.call('UNLINK', payload_key)
forget_prompts({ARGV[2]})
count('expired', 1)
count('discarded', 1)
count_reason(EXPIRED_REASONS, ARGV[3])
return 1
