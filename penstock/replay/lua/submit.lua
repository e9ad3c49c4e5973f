-- ARGV: the idempotency keys' seconds to live, 1 if all submissions are accepted or none, then for each submission its
-- idempotency key, its number of prompts, and payload and priority of each prompt. Returns a row for each submission. With
-- all or none, a key that was used for another number of prompts refuses all: rows without ids are those of new keys.
-- All new prompts are added together: a command for each submission would take most of the script's time.
local columns = {'first_id', 'count', 'replayed'}

local function used(key)
  local seen = key ~= '' and redis.call('HMGET', IDEMPOTENCY .. key, 'first', 'count') or {}
  return tonumber(seen[1] or nil), tonumber(seen[2] or nil)
end

if ARGV[2] == '1' then
  local found, place, is_refused = {}, 3, false
  while place <= #ARGV do
    local n = tonumber(ARGV[place + 1])
    local first, count = used(ARGV[place])
    is_refused = is_refused or (first and count ~= n)
    local last = #found
    found[last + 1], found[last + 2], found[last + 3] = first or 0, count or 0, first and 1 or 0
    place = place + 2 + 2 * n
  end
  if is_refused then return rows(columns, found) end
end

local answers, places, place, next_id = {}, {}, 3, counter('next_prompt_id') + 1
while place <= #ARGV do
  local key, n = ARGV[place], tonumber(ARGV[place + 1])
  local first, count = used(key)
  local replayed = 1
  if not first then
    first, count, replayed = next_id, n, 0
    next_id = next_id + n
    for i = 1, n do places[#places + 1] = place + 2 * i end
    if key ~= '' then
      redis.call('HSET', IDEMPOTENCY .. key, 'first', first, 'count', n)
      redis.call('EXPIRE', IDEMPOTENCY .. key, ARGV[1])
    end
  end
  local last = #answers
  answers[last + 1], answers[last + 2], answers[last + 3] = first, count, replayed
  place = place + 2 + 2 * n
end
add_prompts(places)
return rows(columns, answers)
