-- ARGV: the idempotency keys' seconds to live, 1 if all submissions are accepted or none, then for each submission its
-- idempotency key, unless that is empty the key's owner and the digest of what it asks for, its number of prompts, and
-- payload and priority of each prompt. Returns a row for each submission: without ids but replayed if its key stands for
-- something else, which with all or none refuses all; then new keys have no ids either.
-- Redis does not undo what a failed script has written, so everything is read before the first write, and a key is
-- written after its prompts: a key never stands for prompts that were not stored.
-- All new prompts are added together: a command for each submission would take most of the script's time.
local columns = {'first_id', 'count', 'replayed'}
local answers, places, new_keys, is_refused = {}, {}, {}, false
local place, next_id = 3, counter('next_prompt_id') + 1
local num_pending, num_submitted = check_intake()

-- First id, number and digest of the prompts of a key.
local function find(key, owner)
  local known = redis.call('HGET', IDEMPOTENCY .. key, 'of:' .. owner)
  if not known then return nil end
  local first, count, digest = string.match(known, '^(%d+) (%d+) (.*)$')
  return tonumber(first), tonumber(count), digest
end

while place <= #ARGV do
  local key, owner, digest, name, first, count, stored = ARGV[place]
  if key ~= '' then
    owner, digest = ARGV[place + 1], ARGV[place + 2]
    name, place = owner .. ':' .. key, place + 2
    if new_keys[name] then
      first, count, stored = unpack(new_keys[name], 3)
    else
      first, count, stored = find(key, owner)
    end
  end
  local n, replayed = tonumber(ARGV[place + 1]), 1
  if not first then
    first, count, replayed = next_id, n, 0
    next_id = next_id + n
    for i = 1, n do places[#places + 1] = place + 2 * i end
    if name then new_keys[name] = {key, owner, first, n, digest} end
  elseif count ~= n or stored ~= digest then
    first, count, is_refused = 0, 0, true
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

add_prompts(places, num_pending, num_submitted)
for _, new in pairs(new_keys) do
  local key, owner, first, count, digest = unpack(new)
  redis.call('HSET', IDEMPOTENCY .. key, 'of:' .. owner, first .. ' ' .. count .. ' ' .. digest)
  redis.call('EXPIRE', IDEMPOTENCY .. key, ARGV[1])
end
return rows(columns, answers)
