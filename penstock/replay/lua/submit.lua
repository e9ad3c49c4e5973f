-- ARGV: the idempotency keys' seconds to live, then for each submission its idempotency key, its number of prompts, and
-- payload and priority of each prompt. Returns a row for each submission.
-- All new prompts are added together: a command for each submission would take most of the script's time.
local answers, places, place, next_id = {}, {}, 2, counter('next_prompt_id') + 1
while place <= #ARGV do
  local key, n = ARGV[place], tonumber(ARGV[place + 1])
  local idempotency = IDEMPOTENCY .. key
  local seen = key ~= '' and redis.call('HMGET', idempotency, 'first', 'count') or {}
  local first, count, replayed = tonumber(seen[1] or nil), tonumber(seen[2] or nil), 1
  if not first then
    first, count, replayed = next_id, n, 0
    next_id = next_id + n
    for i = 1, n do places[#places + 1] = place + 2 * i end
    if key ~= '' then
      redis.call('HSET', idempotency, 'first', first, 'count', n)
      redis.call('EXPIRE', idempotency, ARGV[1])
    end
  end
  local last = #answers
  answers[last + 1], answers[last + 2], answers[last + 3] = first, count, replayed
  place = place + 2 + 2 * n
end
add_prompts(places)
return rows({'first_id', 'count', 'replayed'}, answers)
