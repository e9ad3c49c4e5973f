-- ARGV: term, path and step of a checkpoint, then the prompts that were committed and that it does not cover. Undoes
-- their commits and everything that was taken. Returns how many of the prompts are no longer kept; if there are any,
-- nothing is changed. A repetition with the prompts that are still committed ends in the same state.
local fenced = check_term(ARGV[1])
if fenced then return fenced end
local checkpoint, step, is_missing, num_missing = ARGV[2], tonumber(ARGV[3]), {}, 0
for i = 4, #ARGV do
  is_missing[ARGV[i]] = true
  num_missing = num_missing + 1
end

local found, others = {}, {}
for _, of_step in ipairs(redis.call('HKEYS', KEPT_PROMPTS)) do
  local kept = cmsgpack.unpack(redis.call('HGET', KEPT_PROMPTS, of_step))
  others[of_step] = {}
  for i = 1, #kept, 4 do
    local is_whole = tonumber(kept[i + 1]) and tonumber(kept[i + 2])
    if not is_whole then error(KEPT_PROMPTS .. ' ' .. of_step .. ' is not an entry') end
    local list = is_missing[kept[i]] and found or others[of_step]
    if is_missing[kept[i]] then
      is_missing[kept[i]] = nil
      num_missing = num_missing - 1
    end
    for j = i, i + 3 do list[#list + 1] = kept[j] end
  end
end
if num_missing > 0 then return num_missing end

local delivered, saved = {}, redis.call('HKEYS', SAVED_BYTES)
for _, of_step in ipairs(redis.call('HKEYS', MANIFESTS)) do
  for id in string.gmatch(redis.call('HGET', MANIFESTS, of_step), '%d+') do
    if is_delivered(id) then delivered[#delivered + 1] = id end
  end
end
check_prompts(saved, '')
numbers(EXPIRED_REASONS, 'abandoned')
numbers(COUNTERS, 'trained')
local orders = counter('num_rewinds')

-- A higher attempt tells a producer that still holds the old group in its outbox that the group is not wanted.
for i = 1, #found, 4 do
  local id, attempt, priority, prompt = found[i], found[i + 1], found[i + 2], found[i + 3]
  redis.call('HSET', PROMPTS, id, prompt)
  redis.call('HSET', ATTEMPTS, id, attempt + 1)
  if priority ~= '0' then redis.call('HSET', PRIORITIES, id, priority) end
  redis.call('SETBIT', TRAINED, id, 0)
  make_pending(id)
end
if #found > 0 then
  count('trained', -#found / 4)
  count('expired', #found / 4)
  redis.call('HINCRBY', EXPIRED_REASONS, 'abandoned', #found / 4)
end
for of_step, kept in pairs(others) do
  if tonumber(of_step) > step or #kept == 0 then
    redis.call('HDEL', KEPT_PROMPTS, of_step)
  else
    redis.call('HSET', KEPT_PROMPTS, of_step, cmsgpack.pack(kept))
  end
end

for _, id in ipairs(delivered) do make_ready(id) end
redis.call('UNLINK', MANIFESTS)
-- Saved tokens may be those of versions that are abandoned.
drop_all_saved(saved)
redis.call('HSET', COUNTERS, 'step', step, 'committed_step', step, 'rewind_checkpoint', checkpoint,
  'rewind_term', ARGV[1], 'rewind_orders', orders)
signal_lease()
return 0
