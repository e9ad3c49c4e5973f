-- ARGV: id of a dead letter, priority. Submits its prompt anew, under a new id and without failures, and deletes the
-- dead letter. Returns the new prompt id, or 0 when there is no such dead letter. The dead one stays counted as dead:
-- what is pending now will be admitted in its own right.
local entry = redis.call('XRANGE', DEAD, ARGV[1], ARGV[1])[1]
if not entry then return 0 end
local prompt = ''
for i = 1, #entry[2], 2 do
  if entry[2][i] == 'prompt' then prompt = entry[2][i + 1] end
end
local id = redis.call('HINCRBY', COUNTERS, 'next_prompt_id', 1)
redis.call('HSET', PROMPTS, id, prompt)
if ARGV[2] ~= '0' then redis.call('HSET', P .. 'priorities', id, ARGV[2]) end
make_pending(id)
redis.call('XDEL', DEAD, ARGV[1])
return id
