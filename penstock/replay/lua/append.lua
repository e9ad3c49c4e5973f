-- Runs in one transaction after the MSET of the payloads. ARGV: capacity bytes, order of take, then as JSON the columns of
-- the groups: ids, attempts, payload bytes and min versions, all as text. Returns the outcomes in the order of the
-- groups, as a list of names, each followed by how many groups in a row have it. Every path that writes begins with a
-- delete, so it runs when Redis is out of memory: see run_when_full.
local capacity, order = tonumber(ARGV[1]), ARGV[2]
local in_queue, num_inserted, saved_bytes = numbers(COUNTERS, 'queued_bytes', 'inserted', 'saved_bytes', 'admitted')
local ids, attempts, sizes, versions = unpack(cjson.decode(ARGV[3]))

-- The admission of each prompt that is in flight. Such a prompt exists and has no queued group, so nothing else is asked
-- about it. For the others, `metas` has the entry of the queued group, and `has_attempts` whether the prompt was leased.
local admissions, metas, has_attempts
local function look_up()
  admissions, metas, has_attempts = ask_many('ZMSCORE', OPEN, ids), {}, {}
  local others = {}
  for i, id in ipairs(ids) do
    if not admissions[i] then others[#others + 1] = id end
  end
  if #others == 0 then return end
  check_prompts({}, '')
  local found, leased = ask_many('HMGET', META, others), ask_many('HMGET', ATTEMPTS, others)
  for i, id in ipairs(others) do metas[id], has_attempts[id] = found[i], leased[i] end
end
look_up()
local num_bytes = in_queue
for _, size in ipairs(sizes) do num_bytes = num_bytes + size end
if order == 'admission' and num_bytes > capacity then check_prompts({}, '') end -- is_waited_for looks up again
local has_breakers, has_saved = redis.call('HLEN', BREAKERS) > 0, saved_bytes ~= 0 and check_saved(ids)
if has_breakers then breakers_of(ask_many('HMGET', OWNERS, ids)) end
if order == 'freshest' then check('ZCARD', READY_BY_VERSION) end
check('ZCARD', LEASES, READY, PENDING)
check('SCARD', RETURNED)
check('HLEN', META)
check_stream(RESULTS)

-- Accepted groups are stored together at the end. Until then these hold their ids, their positions and their results.
local accepted, places, results, accepted_attempt, num_stored_bytes = {}, {}, {}, {}, in_queue

-- An accepted group whose prompt is pending without an admission: Redis lost its tail, and with it that the prompt was
-- leased. The prompts before it in line had been leased before it, so they are admitted first, and keep their order.
local MAX_READMITTED = 1024
local function restore_admissions()
  run_when_full()
  for i, id in ipairs(accepted) do
    local place = not admissions[places[i]] and redis.call('ZSCORE', PENDING, id)
    if place and not redis.call('ZSCORE', OPEN, id) then
      local priority = redis.call('HGET', PRIORITIES, id)
      local line = redis.call('ZRANGEBYSCORE', PENDING, '-inf', '(' .. place, 'LIMIT', 0, MAX_READMITTED)
      for _, other in ipairs(line) do
        if not redis.call('ZSCORE', OPEN, other) and redis.call('HGET', PRIORITIES, other) == priority then
          count('admitted', 1)
          redis.call('ZADD', OPEN, next_admission(), other)
          redis.call('SADD', RETURNED, other)
          redis.call('ZADD', PENDING, '-inf', other)
        end
      end
      redis.call('ZADD', OPEN, next_admission(), id)
    end
  end
end

-- The numbers of the admissions of all accepted groups; false for a prompt that has none.
local function accepted_admissions()
  local known, is_complete = {}, true
  for i, place in ipairs(places) do
    known[i] = admissions[place]
    is_complete = is_complete and known[i]
  end
  if is_complete then return known end
  if order == 'admission' then restore_admissions() end
  return ask_many('ZMSCORE', OPEN, accepted)
end

local function store_accepted()
  if #accepted == 0 then return end
  local breakers = has_breakers and breakers_of(ask_many('HMGET', OWNERS, accepted)) or {}
  local found, entries, ready, by_version, sum = accepted_admissions(), {}, {}, {}, 0

  -- release_admission for all accepted groups.
  call_many('HDEL', OWNERS, accepted)
  local num_in_flight = call_many('ZREM', LEASES, accepted)
  if num_in_flight < #accepted then
    num_in_flight = num_in_flight + call_many('SREM', RETURNED, accepted)
    call_many('ZREM', PENDING, accepted)
    if num_in_flight < #accepted then count('admitted', #accepted - num_in_flight) end
  end
  call_many('ZREM', OPEN, accepted)

  close_breakers(breakers)
  if has_saved then drop_all_saved(accepted) end
  local now = string.match(record_result('queued', table.concat(results, ' '), ''), '^%d+')
  for i, id in ipairs(accepted) do
    local place, number = places[i], found[i] or next_admission()
    entries[2 * i - 1] = id
    entries[2 * i] = write_meta(attempts[place], sizes[place], number, versions[place], now)
    ready[2 * i - 1], ready[2 * i] = number, id
    if order == 'freshest' then by_version[2 * i - 1], by_version[2 * i] = versions[place], id end
    sum = sum + sizes[place]
  end
  call_many('HSET', META, entries)
  call_many('ZADD', READY, ready)
  call_many('ZADD', READY_BY_VERSION, by_version)
  num_stored_bytes, num_inserted = num_stored_bytes + sum, num_inserted + #accepted
  redis.call('HSET', COUNTERS, 'queued_bytes', num_stored_bytes, 'inserted', num_inserted)
  accepted, places, results = {}, {}, {}
end

-- In the order of admission, a group that all ready groups wait for is accepted even if the queue is full. Otherwise
-- nothing could be taken, and the queue would stay full.
local function is_waited_for(id)
  if order ~= 'admission' then return false end
  if #accepted > 0 then
    store_accepted()
    look_up()
  end
  if redis.call('ZRANGE', OPEN, 0, 0)[1] ~= id then return false end
  return tonumber(redis.call('ZRANGE', READY, 0, 0, 'WITHSCORES')[2]) > tonumber(redis.call('ZSCORE', OPEN, id))
end

-- The payloads of refused groups are deleted at the end, and those that earlier attempts of an accepted one left.
local refused = {}
local function refuse(i, outcome)
  refused[#refused + 1] = group_key(ids[i], attempts[i])
  return outcome
end

local function append(i)
  local id, attempt, bytes = ids[i], attempts[i], tonumber(sizes[i])
  local queued_attempt = accepted_attempt[id] or (metas[id] and read_meta(metas[id]))
  if queued_attempt == attempt then return 'duplicate' end
  if queued_attempt then return refuse(i, 'duplicate') end
  -- A prompt that has attempts exists. Redis may have lost the attempts of one that has none.
  if not admissions[i] and not has_attempts[id] and redis.call('HEXISTS', PROMPTS, id) == 0 then
    return refuse(i, redis.call('GETBIT', TRAINED, id) == 1 and 'duplicate' or 'unknown')
  end
  if in_queue > 0 and in_queue + bytes > capacity and not is_waited_for(id) then return refuse(i, 'full') end
  local last = #accepted + 1
  accepted[last], places[last], results[last], accepted_attempt[id] = id, i, id .. ':' .. attempt, attempt
  in_queue = in_queue + bytes
  for earlier = 1, attempt - 1 do refused[#refused + 1] = group_key(id, earlier) end
  return 'accepted'
end

local outcomes = {}
for i = 1, #ids do
  local outcome, last = append(i), #outcomes
  if outcomes[last - 1] == outcome then
    outcomes[last] = outcomes[last] + 1
  else
    outcomes[last + 1], outcomes[last + 2] = outcome, 1
  end
end
store_accepted()
for _, key in ipairs(refused) do redis.call('UNLINK', key) end
return outcomes
