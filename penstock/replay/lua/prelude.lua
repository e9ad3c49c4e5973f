-- Shared by every script. KEYS[1] is the run's key prefix, whose hash tag keeps a run on one shard.
-- Time is Redis' own, so that no two clocks are ever compared.
local P = KEYS[1]
local COUNTERS, PROMPTS, ATTEMPTS, FAILURES = P .. 'counters', P .. 'prompts', P .. 'attempts', P .. 'failures'
local PENDING, LEASES, OWNERS, RETURNED = P .. 'pending', P .. 'leases', P .. 'owners', P .. 'returned'
-- Prompts in flight (leased, or returned and to be leased again) by the number of their admission.
local OPEN = P .. 'open'
local READY, FRESH, DELIVERED, META = P .. 'ready', P .. 'fresh', P .. 'delivered', P .. 'meta'
local MANIFESTS, TRAINED, DEAD, BURIED = P .. 'manifests', P .. 'trained', P .. 'dead', P .. 'buried'
-- Datasets that are fed: name to the position of the next prompt, and name:fingerprint to what they are.
local FEEDS = P .. 'feeds'
-- When prompts were submitted: the first id of those that came at once, and their time.
local SUBMITTED = P .. 'submitted'
local MAX_SUBMITTED = 4096
local EVAL_PENDING, EVAL_LEASES, EVAL_OF = P .. 'eval_pending', P .. 'eval_leases', P .. 'eval_of'

local CANCELLED = P .. 'cancelled'
-- What finished, in order: see results.py. Trimmed, so that clients who never ask cost little.
local RESULTS, MOST_RESULTS = P .. 'results', 20000

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function counter(name)
  return tonumber(redis.call('HGET', COUNTERS, name) or '0')
end

local function count(name, by)
  redis.call('HINCRBY', COUNTERS, name, by)
end

-- Many members in few commands: each costs a call and an entry in the append-only file. 1,000 values are well within what
-- Lua passes to a function, and keep pairs together. Returns the sum of what the commands answer.
local function call_many(command, key, values)
  local sum = 0
  for first = 1, #values, 1000 do
    sum = sum + redis.call(command, key, unpack(values, first, math.min(first + 999, #values)))
  end
  return sum
end

-- The same for a command that answers with a value for each.
local function ask_many(command, key, fields)
  if #fields <= 1000 then return #fields > 0 and redis.call(command, key, unpack(fields)) or {} end
  local answers = {}
  for first = 1, #fields, 1000 do
    for i, answer in ipairs(redis.call(command, key, unpack(fields, first, math.min(first + 999, #fields)))) do
      answers[first + i - 1] = answer
    end
  end
  return answers
end

-- Each attempt has a payload of its own, so that a late duplicate never overwrites a group that was delivered.
local function group_key(id, attempt)
  return P .. 'group:' .. id .. ':' .. attempt
end

local function in_flight()
  return redis.call('ZCARD', LEASES) + redis.call('SCARD', RETURNED)
end

local function queued()
  return redis.call('ZCARD', READY) + redis.call('SCARD', DELIVERED)
end

-- A full Redis refuses a script whose first write could grow memory, and lets one run whole that begins with a delete.
-- What frees memory, or keeps leases alive until it is freed, has to run: it deletes nothing first.
local function run_when_full()
  redis.call('HDEL', COUNTERS, '')
end

local function check_term(term)
  local current = counter('term')
  if tonumber(term) ~= current then
    return redis.error_reply('FENCED term ' .. term .. ' has passed; the current one is ' .. current)
  end
  run_when_full()
end

-- Priority first, then age: a prompt that expired stands where it stood.
local function pending_score(priority, id)
  return -tonumber(priority) * 1e12 + id
end

local function make_pending(id)
  redis.call('ZADD', PENDING, pending_score(redis.call('HGET', P .. 'priorities', id) or '0', id), id)
end

-- `places` are those of payloads in ARGV, each with its priority after it. Their ids follow the counter's, in this order.
local function add_prompts(places)
  if #places == 0 then return end
  local before = redis.call('HINCRBY', COUNTERS, 'next_prompt_id', #places) - #places
  local prompts, priorities, pending = {}, {}, {}
  for i, place in ipairs(places) do
    local id, priority = before + i, ARGV[place + 1]
    prompts[2 * i - 1], prompts[2 * i] = id, ARGV[place]
    if priority == '0' then
      pending[2 * i - 1] = id
    else
      pending[2 * i - 1] = pending_score(priority, id)
      priorities[#priorities + 1] = id
      priorities[#priorities + 1] = priority
    end
    pending[2 * i] = id
  end
  call_many('HSET', PROMPTS, prompts)
  call_many('HSET', P .. 'priorities', priorities)
  call_many('ZADD', PENDING, pending)
  redis.call('ZADD', SUBMITTED, before + 1, now_ms() .. ':' .. before + 1)
  if redis.call('ZCARD', SUBMITTED) > MAX_SUBMITTED then redis.call('ZREMRANGEBYRANK', SUBMITTED, 0, 0) end
end

local function drop_lease(id)
  redis.call('HDEL', OWNERS, id)
  return redis.call('ZREM', LEASES, id)
end

-- META holds 'attempt bytes admission min_version time' of each queued group. Returns nil where there is none.
local function group_meta(id)
  local meta = redis.call('HGET', META, id)
  if not meta then return nil end
  local attempt, bytes, admission, version = string.match(meta, '(%d+) (%d+) (%d+) (%-?%d+)')
  return attempt, tonumber(bytes), admission, version
end

local function make_ready(id, bytes, admission, version)
  redis.call('ZADD', READY, admission, id)
  redis.call('ZADD', FRESH, version, id)
  count('queued_bytes', bytes)
end

-- Takes a queued group out of wherever it waits and returns its payload's key; nil when there is none.
local function remove_group(id)
  local attempt, bytes = group_meta(id)
  if not attempt then return nil end
  redis.call('HDEL', META, id)
  redis.call('ZREM', FRESH, id)
  if redis.call('ZREM', READY, id) == 1 then count('queued_bytes', -bytes) end
  redis.call('SREM', DELIVERED, id)
  return group_key(id, attempt)
end

local function next_admission()
  return redis.call('HINCRBY', COUNTERS, 'admission', 1)
end

-- Removes a prompt from every place before its group counts as queued, trained or dead, and returns the number of its
-- admission. A prompt that was pending without having been admitted (it had expired, or Redis lost its tail) is
-- admitted by this; a group that came past admission is numbered now.
local function settle_admission(id)
  local was_leased = drop_lease(id) == 1
  local was_returned = redis.call('SREM', RETURNED, id) == 1
  redis.call('ZREM', PENDING, id)
  if not was_leased and not was_returned then count('admitted', 1) end
  local admission = redis.call('ZSCORE', OPEN, id) or next_admission()
  redis.call('ZREM', OPEN, id)
  return admission
end

local function forget_prompts(ids)
  call_many('HDEL', PROMPTS, ids)
  call_many('HDEL', ATTEMPTS, ids)
  for _, key in ipairs({FAILURES, P .. 'priorities'}) do
    if redis.call('EXISTS', key) == 1 then call_many('HDEL', key, ids) end
  end
end

-- A reason as a metric's label: its first word.
local function count_reason(name, reason)
  redis.call('HINCRBY', P .. name, string.match(reason, '^[%w_]+') or 'other', 1)
end

-- `what` is queued ('id:attempt id:attempt ...'), dead or cancelled ('id').
local function record_result(what, ids, reason)
  redis.call('XADD', RESULTS, 'MAXLEN', '~', MOST_RESULTS, '*', what, ids, 'reason', reason)
end

-- Where a prompt is, its attempt and its payload; an unknown one has no state.
local function prompt_state(id)
  if redis.call('GETBIT', TRAINED, id) == 1 then return 'trained', 0, '' end
  local payload = redis.call('HGET', PROMPTS, id)
  if not payload then
    if redis.call('GETBIT', BURIED, id) == 1 then return 'dead_lettered', 0, '' end
    if redis.call('GETBIT', CANCELLED, id) == 1 then return 'cancelled', 0, '' end
    return nil
  end
  local attempt = tonumber(redis.call('HGET', ATTEMPTS, id) or '0')
  if redis.call('HEXISTS', META, id) == 1 then return 'queued', attempt, payload end
  if redis.call('ZSCORE', LEASES, id) or redis.call('ZSCORE', EVAL_LEASES, id) then return 'leased', attempt, payload end
  return 'pending', attempt, payload
end

local function bury(id, reason, payload)
  redis.call('XADD', DEAD, '*', 'prompt_id', id, 'reason', reason, 'prompt', redis.call('HGET', PROMPTS, id) or '',
    'group', payload or '')
  redis.call('SETBIT', BURIED, id, 1)
  count_reason('dead_reasons', reason)
  count('dead_lettered', 1)
  record_result('dead', id, reason)
  forget_prompts({id})
end

-- A lease ended without a group. Counts a failure unless the reason is empty; past the limit the prompt is dead.
-- Otherwise it keeps its admission and goes to the front: groups admitted after it may be waiting for its own.
local function return_prompt(id, failure, max_attempts)
  drop_lease(id)
  if failure ~= '' and redis.call('HINCRBY', FAILURES, id, 1) >= max_attempts then
    redis.call('ZREM', OPEN, id)
    bury(id, failure)
    return
  end
  redis.call('SADD', RETURNED, id)
  redis.call('ZADD', PENDING, '-inf', id)
end

-- Counts a prompt of an evaluation as finished. The score of a whole evaluation is kept by its benchmark: its id without the
-- number at the end. More benchmarks than MAX_BENCHMARKS are not kept: each is a label of a metric.
local MAX_BENCHMARKS = 256
local function finish_evaluation_prompt(evaluation_id)
  local evaluation, scores = P .. 'evaluation:' .. evaluation_id, P .. 'scores'
  local num_finished = redis.call('HINCRBY', evaluation, 'num_finished', 1)
  local num_prompts, num_samples, sum = unpack(redis.call('HMGET', evaluation, 'num_prompts', 'num_samples', 'reward_sum'))
  if num_finished ~= tonumber(num_prompts) or num_samples == '0' then return end
  local benchmark = string.match(evaluation_id, '^(.*)%-%d+$') or evaluation_id
  if redis.call('HEXISTS', scores, benchmark) == 1 or redis.call('HLEN', scores) < MAX_BENCHMARKS then
    redis.call('HSET', scores, benchmark, tostring(sum / num_samples))
  end
end

-- The same for a held-out prompt. One that keeps failing counts as finished, without samples: an evaluation ends.
local function return_evaluation(id, failure, max_attempts)
  redis.call('ZREM', EVAL_LEASES, id)
  redis.call('HDEL', OWNERS, id)
  if failure ~= '' and redis.call('HINCRBY', FAILURES, id, 1) >= max_attempts then
    finish_evaluation_prompt(redis.call('HGET', EVAL_OF, id))
    redis.call('HDEL', EVAL_OF, id)
    forget_prompts({id})
    return
  end
  redis.call('ZADD', EVAL_PENDING, id, id)
end

-- Ids come from a counter that goes back when Redis loses its tail, and may then stand for other prompts than those that
-- servers and ledgers know by them. So no prompt is leased before Redis can no longer lose it: what was the newest id
-- ('settling_id') is safe ('settled_id') once it has been so for the time that Redis may lose. Returns the newest safe id.
local function settle_ids(now, settle_ms)
  local newest, settled_id = counter('next_prompt_id'), counter('settled_id')
  if counter('settling_id') > settled_id and now - counter('settling_ms') >= settle_ms then
    settled_id = counter('settling_id')
  end
  if newest > settled_id and counter('settling_id') <= settled_id then
    redis.call('HSET', COUNTERS, 'settling_id', newest, 'settling_ms', now)
    if settle_ms == 0 then settled_id = newest end
  end
  if settled_id > counter('settled_id') then redis.call('HSET', COUNTERS, 'settled_id', settled_id) end
  return settled_id
end
