-- ARGV: term, step, max groups, order, capacity bytes, then the ids in the step's manifest that the learner knows.
-- Returns the groups that the manifest holds and the learner does not know, because the answer to an earlier take was
-- lost. If there are none, moves ready groups into the manifest and returns those. The answer has two texts, the ids and
-- the attempts, because a text is cheaper to send and to read than a list, and the bytes of all payloads.
-- In the order of admission, no group is taken while a prompt that was admitted before it is in flight.
local function groups(ids, attempts, num_bytes)
  return {'prompt_ids', table.concat(ids, ' '), 'attempts', table.concat(attempts, ' '), 'num_bytes', num_bytes}
end
local fenced = check_term(ARGV[1])
if fenced then return fenced end
local manifest, is_known, ids, attempts, sum = redis.call('HGET', MANIFESTS, ARGV[2]), {}, {}, {}, 0
for i = 6, #ARGV do is_known[ARGV[i]] = true end
for id in string.gmatch(manifest or '', '%d+') do
  local attempt, num_bytes
  if not is_known[id] and redis.call('SISMEMBER', DELIVERED, id) == 1 then attempt, num_bytes = group_meta(id) end
  if attempt then ids[#ids + 1], attempts[#attempts + 1], sum = id, attempt, sum + num_bytes end
end
if #ids > 0 then return groups(ids, attempts, sum) end

-- Taken groups still count in the admission. Only a queue that had too many bytes has room for prompts now.
local last, is_full = tonumber(ARGV[3]) - 1, counter('queued_bytes') >= tonumber(ARGV[5])
if is_full then check_stream(LEASE_SIGNALS) end
check('SCARD', DELIVERED)
if ARGV[4] == 'freshest' then
  complete_ready_by_version()
  ids = redis.call('ZREVRANGE', READY_BY_VERSION, 0, last)
elseif ARGV[4] == 'admission' then
  local oldest_open = redis.call('ZRANGE', OPEN, 0, 0, 'WITHSCORES')[2] or '+inf'
  ids = redis.call('ZRANGEBYSCORE', READY, '-inf', '(' .. oldest_open, 'LIMIT', 0, ARGV[3])
else
  ids = redis.call('ZRANGE', READY, 0, last)
end
if #ids == 0 then return groups({}, {}, 0) end
for i, text in ipairs(ask_many('HMGET', META, ids)) do
  local attempt, num_bytes = read_meta_start(text)
  attempts[i] = attempt
  sum = sum + num_bytes
end

local is_by_version = redis.call('ZCARD', READY_BY_VERSION) > 0
call_many('ZREM', READY, ids)
if is_by_version then call_many('ZREM', READY_BY_VERSION, ids) end
call_many('SADD', DELIVERED, ids)
redis.call('HSET', MANIFESTS, ARGV[2], (manifest and manifest .. ' ' or '') .. table.concat(ids, ' '))
if is_full then signal_lease() end
count('queued_bytes', -sum)
return groups(ids, attempts, sum)
