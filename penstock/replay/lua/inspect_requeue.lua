-- ARGV: id of a dead letter, priority. Submits its prompt again under a new id, without failures, and deletes the dead
-- letter. Returns the new prompt id, or 0 if there is no such dead letter. The old prompt still counts as
-- dead-lettered; the new one is admitted like any other.
local entry = redis.call('XRANGE', DEAD, ARGV[1], ARGV[1])[1]
if not entry then return 0 end
local prompt = ''
for i = 1, #entry[2], 2 do
  if entry[2][i] == 'prompt' then prompt = entry[2][i + 1] end
end
check_intake()
local id = redis.call('HINCRBY', COUNTERS, 'next_prompt_id', 1)
redis.call('HSET', PROMPTS, id, prompt)
if ARGV[2] ~= '0' then redis.call('HSET', PRIORITIES, id, ARGV[2]) end
make_pending(id)
signal_lease()
redis.call('XDEL', DEAD, ARGV[1])
return id
