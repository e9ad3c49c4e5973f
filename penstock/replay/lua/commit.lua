-- ARGV: term, step, step of the oldest checkpoint, a text with the prompt ids. Acknowledges and deletes the groups that a durable
-- checkpoint covers, and keeps their prompts for rewind.lua. Returns how many prompts were still there.
local fenced = check_term(ARGV[1])
if fenced then return fenced end
local ids, is_covered = {}, {}
for id in string.gmatch(ARGV[4], '%d+') do
  if not is_covered[id] then ids[#ids + 1] = id end
  is_covered[id] = true
end

-- A run that was begun without kept prompts can only be rewound to what was committed before the first kept ones.
local stored_step, trained = numbers(COUNTERS, 'committed_step', 'trained', 'queued_bytes')
local kept_after = tonumber(redis.call('HGET', COUNTERS, 'kept_after') or stored_step)
local committed_step, oldest_step = math.max(stored_step, tonumber(ARGV[2])), math.max(kept_after, tonumber(ARGV[3]))

-- Every queued group has its prompt. If Redis lost a group with its tail, its prompt may still be there.
local queued_ids, texts, payload_keys, found, without_group, num_queued = {}, {}, {}, {}, {}, 0
for i, text in ipairs(ask_many('HMGET', META, ids)) do
  local id = ids[i]
  if text then
    num_queued = num_queued + 1
    queued_ids[num_queued], texts[num_queued] = id, text
    payload_keys[num_queued] = group_key(id, read_meta_attempt(text))
    found[#found + 1] = id
  elseif redis.call('HEXISTS', PROMPTS, id) == 1 then
    without_group[#without_group + 1] = id
    found[#found + 1] = id
  end
end

-- Committed prompts are kept under the step of their commit.
local kept = redis.call('HGET', KEPT_PROMPTS, committed_step)
kept = kept and cmsgpack.unpack(kept) or {}
local prompts, attempts, hashes = ask_many('HMGET', PROMPTS, found), ask_many('HMGET', ATTEMPTS, found), prompt_hashes()
local priorities = hashes[#hashes] == PRIORITIES and ask_many('HMGET', PRIORITIES, found) or {}
local last = #kept
for i, id in ipairs(found) do
  kept[last + 1], kept[last + 2], kept[last + 3] = id, attempts[i] or '0', priorities[i] or '0'
  kept[last + 4] = prompts[i]
  last = last + 4
end

-- Groups that a manifest of these steps still holds were neither trained nor dropped: the answer to a take was lost, or
-- Redis lost its tail. They become ready again. A manifest of a later step keeps the groups that are not covered; it is
-- searched only if the closed ones do not hold all that are.
local num_closed, closed, later, returned = 0, {}, {}, {}
for _, step in ipairs(redis.call('HKEYS', MANIFESTS)) do
  if tonumber(step) <= tonumber(ARGV[2]) then
    for id in string.gmatch(redis.call('HGET', MANIFESTS, step), '%d+') do
      if is_covered[id] then
        if is_covered[id] ~= 'closed' then num_closed = num_closed + 1 end
        is_covered[id] = 'closed'
      elseif is_delivered(id) then
        returned[#returned + 1] = id
      end
    end
    closed[#closed + 1] = step
  else
    later[#later + 1] = step
  end
end

-- The bits of the ids in `trained`. Ids are near each other, so one word of the bitmap holds many.
local words, bits, wanted, new_words = {}, {}, {}, {}
for _, id in ipairs(ids) do
  local place = id % 32
  local word = (id - place) / 32
  if not bits[word] then
    words[#words + 1], bits[word] = word, 0
    for _, part in ipairs({'GET', 'u32', '#' .. word}) do wanted[#wanted + 1] = part end
  end
  bits[word] = bit.bor(bits[word], bit.lshift(1, 31 - place))
end
for first = 1, #words, 300 do
  local last, changed = math.min(first + 299, #words), {}
  local before = redis.call('BITFIELD', TRAINED, unpack(wanted, 3 * first - 2, 3 * last))
  for i = first, last do
    local value = bit.bor(before[i - first + 1], bits[words[i]]) % 2 ^ 32
    for _, part in ipairs({'SET', 'u32', '#' .. words[i], string.format('%.0f', value)}) do
      changed[#changed + 1] = part
    end
  end
  new_words[#new_words + 1] = changed
end

check('ZCARD', READY, READY_BY_VERSION)
check('SCARD', DELIVERED)
check_saved(found)
if #without_group > 0 then
  check('HLEN', OWNERS)
  check('ZCARD', LEASES, PENDING, OPEN)
  check('SCARD', RETURNED)
  numbers(COUNTERS, 'admitted', 'admission')
end

for _, id in ipairs(without_group) do release_admission(id) end
if call_many('SREM', DELIVERED, queued_ids) < num_queued then
  for i, id in ipairs(queued_ids) do
    local _, num_bytes = read_meta_start(texts[i])
    if redis.call('ZREM', READY, id) == 1 then count('queued_bytes', -num_bytes) end
  end
  leave_ready_by_version(queued_ids)
end
call_many('HDEL', META, queued_ids)
for first = 1, #payload_keys, 1000 do
  redis.call('UNLINK', unpack(payload_keys, first, math.min(first + 999, #payload_keys)))
end
if #found > 0 then redis.call('HSET', KEPT_PROMPTS, committed_step, cmsgpack.pack(kept)) end
forget_prompts(found, hashes)
for _, changed in ipairs(new_words) do redis.call('BITFIELD', TRAINED, unpack(changed)) end
for _, id in ipairs(returned) do make_ready(id) end
call_many('HDEL', MANIFESTS, closed)
if num_closed < #ids then
  for _, step in ipairs(later) do
    for id in string.gmatch(redis.call('HGET', MANIFESTS, step) or '', '%d+') do
      if is_covered[id] then leave_manifest(id) end
    end
  end
end
redis.call('HSET', COUNTERS, 'committed_step', committed_step, 'kept_after', oldest_step, 'trained', trained + #found)
-- Forgets the prompts that every checkpoint covers.
if oldest_step > kept_after then
  for _, step in ipairs(redis.call('HKEYS', KEPT_PROMPTS)) do
    if tonumber(step) <= oldest_step then redis.call('HDEL', KEPT_PROMPTS, step) end
  end
end
return #found
