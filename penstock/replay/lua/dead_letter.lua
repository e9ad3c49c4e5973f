-- ARGV: term, id, reason. Moves a queued group, with its payload, to the dead letters. Returns 1 if there was one.
local fenced = check_term(ARGV[1])
if fenced then return fenced end
local attempt = group_meta(ARGV[2])
if not attempt then return 0 end
local payload = redis.call('GET', group_key(ARGV[2], attempt))
check_prompts({ARGV[2]}, ARGV[3])
check('HLEN', MANIFESTS)
local payload_key = remove_group(ARGV[2])
redis.call('UNLINK', payload_key)
dead_letter(ARGV[2], ARGV[3], payload)
return 1
