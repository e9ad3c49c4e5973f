-- Runs in one transaction after the MSET of the payloads. ARGV: capacity bytes, order of take, then id, attempt,
-- payload bytes and min version of each group. Returns one outcome for each group. Every path that writes begins with a
-- delete, so it runs when Redis is out of memory: see run_when_full.
local capacity, order, num_groups = tonumber(ARGV[1]), ARGV[2], (#ARGV - 2) / 4
local ids = {}
for i = 1, num_groups do ids[i] = ARGV[4 * i - 1] end
local metas, attempts, in_queue = ask_many('HMGET', META, ids), ask_many('HMGET', ATTEMPTS, ids), counter('queued_bytes')

-- Accepted groups are stored together at the end. Until then these hold their ids and their positions in ARGV.
local accepted, places, accepted_attempt = {}, {}, {}

-- An accepted group whose prompt is pending without an admission: Redis lost its tail, and with it that the prompt was
-- leased. The prompts before it in line had been leased before it, so they are admitted first, and keep their order.
local MAX_READMITTED = 1024
local function restore_admissions()
  local numbers = ask_many('ZMSCORE', OPEN, accepted)
  for i, id in ipairs(accepted) do
    local place = not numbers[i] and redis.call('ZSCORE', PENDING, id)
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

-- release_admission for all accepted groups. Returns the numbers of their admissions.
local function release_admissions()
  call_many('HDEL', OWNERS, accepted)
  local num_in_flight = call_many('ZREM', LEASES, accepted)
  if num_in_flight < #accepted then
    num_in_flight = num_in_flight + call_many('SREM', RETURNED, accepted)
    call_many('ZREM', PENDING, accepted)
    if num_in_flight < #accepted then count('admitted', #accepted - num_in_flight) end
  end
  local numbers = ask_many('ZMSCORE', OPEN, accepted)
  call_many('ZREM', OPEN, accepted)
  return numbers
end

local function store_accepted()
  if #accepted == 0 then return end
  if order == 'admission' then
    run_when_full()
    restore_admissions()
  end
  local owners = redis.call('EXISTS', BREAKERS) == 1 and ask_many('HMGET', OWNERS, accepted) or {}
  local numbers, metas_stored, ready, fresh, appended, sum = release_admissions(), {}, {}, {}, {}, 0
  record_successes(owners)
  drop_all_saved(accepted)
  local now = now_ms()
  for i, id in ipairs(accepted) do
    local place, number = places[i], numbers[i] or next_admission()
    local attempt, num_bytes, min_version = ARGV[place + 1], ARGV[place + 2], ARGV[place + 3]
    metas_stored[2 * i - 1], metas_stored[2 * i] = id, write_meta(attempt, num_bytes, number, min_version, now)
    ready[2 * i - 1], ready[2 * i] = number, id
    fresh[2 * i - 1], fresh[2 * i] = min_version, id
    appended[i] = id .. ':' .. attempt
    sum = sum + num_bytes
  end
  call_many('HSET', META, metas_stored)
  call_many('ZADD', READY, ready)
  call_many('ZADD', FRESH, fresh)
  count('queued_bytes', sum)
  count('inserted', #accepted)
  record_result('queued', table.concat(appended, ' '), '')
  accepted, places = {}, {}
end

-- In the order of admission, a group that all ready groups wait for is accepted even if the queue is full. Otherwise
-- nothing could be taken, and the queue would stay full.
local function is_waited_for(id)
  if order ~= 'admission' then return false end
  store_accepted()
  if redis.call('ZRANGE', OPEN, 0, 0)[1] ~= id then return false end
  return tonumber(redis.call('ZRANGE', READY, 0, 0, 'WITHSCORES')[2]) > tonumber(redis.call('ZSCORE', OPEN, id))
end

local function append(i, place)
  local id, attempt, bytes = ARGV[place], ARGV[place + 1], tonumber(ARGV[place + 2])
  local function refuse(outcome)
    redis.call('UNLINK', group_key(id, attempt))
    return outcome
  end
  local queued_attempt = accepted_attempt[id] or (metas[i] and read_meta(metas[i]))
  if queued_attempt == attempt then return 'duplicate' end
  if queued_attempt then return refuse('duplicate') end
  -- A prompt that has attempts exists. Redis may have lost the attempts of one that has none.
  if not attempts[i] and redis.call('HEXISTS', PROMPTS, id) == 0 then
    return refuse(redis.call('GETBIT', TRAINED, id) == 1 and 'duplicate' or 'unknown')
  end
  if in_queue > 0 and in_queue + bytes > capacity and not is_waited_for(id) then return refuse('full') end
  accepted[#accepted + 1], places[#places + 1], accepted_attempt[id] = id, place, attempt
  in_queue = in_queue + bytes
  return 'accepted'
end

local outcomes = {}
for i = 1, num_groups do outcomes[i] = append(i, 4 * i - 1) end
store_accepted()
return outcomes
