-- ARGV: the idempotency keys' seconds to live, 1 if all submissions are accepted or none, then for each submission its
-- idempotency key, its number of prompts, and payload and priority of each prompt. Returns a row for each submission. With
-- all or none, a key that was used for another number of prompts refuses all: rows without ids are those of new keys.
-- Redis does not undo what a failed script has written, so everything is read before the first write, and a key is
-- written after its prompts: a key never stands for prompts that were not stored.
-- All new prompts are added together: a command for each submission would take most of the script's time.
local columns = {'first_id', 'count', 'replayed'}
local answers, places, new_keys, is_refused = {}, {}, {}, false
local place, next_id = 3, counter('next_prompt_id') + 1
check_intake()
while place <= #ARGV do
  local key, n = ARGV[place], tonumber(ARGV[place + 1])
  local known = new_keys[key] or (key ~= '' and redis.call('HMGET', IDEMPOTENCY .. key, 'first', 'count')) or {}
  local first, count = tonumber(known[1] or nil), tonumber(known[2] or nil)
  local replayed = first and 1 or 0
  is_refused = is_refused or (first and count ~= n)
  if not first then
    first, count = next_id, n
    next_id = next_id + n
    for i = 1, n do places[#places + 1] = place + 2 * i end
    if key ~= '' then new_keys[key] = {first, n} end
  end
  local last = #answers
  answers[last + 1], answers[last + 2], answers[last + 3] = first, count, replayed
  place = place + 2 + 2 * n
end
if ARGV[2] == '1' and is_refused then
  for i = 1, #answers, 3 do
    if answers[i + 2] == 0 then answers[i], answers[i + 1] = 0, 0 end
  end
  return rows(columns, answers)
end

add_prompts(places)
for key, new in pairs(new_keys) do
  redis.call('HSET', IDEMPOTENCY .. key, 'first', new[1], 'count', new[2])
  redis.call('EXPIRE', IDEMPOTENCY .. key, ARGV[1])
end
return rows(columns, answers)
