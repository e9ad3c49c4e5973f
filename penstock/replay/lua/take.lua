-- ARGV: term, step, max groups, order, capacity bytes, then the ids in the step's manifest that the learner knows.
-- Returns the groups that the manifest holds and the learner does not know, because the answer to an earlier take was
-- lost. If there are none, moves ready groups into the manifest and returns those. The answer has two texts, the ids and
-- the attempts, because a text is cheaper to send and to read than a list.
-- In the order of admission, no group is taken while a prompt that was admitted before it is in flight.
local function groups(ids, attempts)
  return {'prompt_ids', table.concat(ids, ' '), 'attempts', table.concat(attempts, ' ')}
end
local fenced = check_term(ARGV[1])
if fenced then return fenced end
local manifest, is_known, ids, attempts = redis.call('HGET', MANIFESTS, ARGV[2]), {}, {}, {}
for i = 6, #ARGV do is_known[ARGV[i]] = true end
for id in string.gmatch(manifest or '', '%d+') do
  local attempt = not is_known[id] and redis.call('SISMEMBER', DELIVERED, id) == 1 and group_meta(id)
  if attempt then ids[#ids + 1], attempts[#attempts + 1] = id, attempt end
end
if #ids > 0 then return groups(ids, attempts) end

local last = tonumber(ARGV[3]) - 1
if ARGV[4] == 'freshest' then
  complete_fresh()
  ids = redis.call('ZREVRANGE', FRESH, 0, last)
elseif ARGV[4] == 'admission' then
  local oldest_open = redis.call('ZRANGE', OPEN, 0, 0, 'WITHSCORES')[2] or '+inf'
  ids = redis.call('ZRANGEBYSCORE', READY, '-inf', '(' .. oldest_open, 'LIMIT', 0, ARGV[3])
else
  ids = redis.call('ZRANGE', READY, 0, last)
end
if #ids == 0 then return groups({}, {}) end
call_many('ZREM', READY, ids)
leave_fresh(ids)
call_many('SADD', DELIVERED, ids)
redis.call('HSET', MANIFESTS, ARGV[2], (manifest and manifest .. ' ' or '') .. table.concat(ids, ' '))
local sum = 0
for i, text in ipairs(ask_many('HMGET', META, ids)) do
  local attempt, num_bytes = read_meta_start(text)
  attempts[i] = attempt
  sum = sum + num_bytes
end
-- Taken groups still count in the admission. Only a queue that had too many bytes has room for prompts now.
if counter('queued_bytes') >= tonumber(ARGV[5]) then signal_lease() end
count('queued_bytes', -sum)
return groups(ids, attempts)
