-- Shared by the queue's scripts. The keys are described in penstock/store/keys.py.

-- How many submissions `submitted` remembers.
local MAX_SUBMITTED = 4096
-- About how many entries the stream `results` keeps, so that clients who never read it cost little.
local MAX_RESULTS = 20000

-- A table as an answer: its column names, then the values of all rows in one list. See read_rows in redis_client.py.
local function rows(columns, values)
  return {columns, values}
end

-- Wakes the servers that wait for prompts. Scripts call it when they add a prompt, or make room for one.
local function signal_lease()
  redis.call('XADD', LEASE_SIGNALS, 'MAXLEN', 1, '*', '', '')
end

-- Calls a command with many values in few calls: each call costs time and an entry in the append-only file. 1,000
-- values are well within what Lua passes to a function, and keep pairs together. Returns the sum of the answers.
local function call_many(command, key, values)
  local sum = 0
  for first = 1, #values, 1000 do
    sum = sum + redis.call(command, key, unpack(values, first, math.min(first + 999, #values)))
  end
  return sum
end

-- The same for a command that answers with one value for each field.
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

-- Fails if add_prompts would fail. Returns what it needs to know: how many prompts and submissions there are.
local function check_intake()
  check('HLEN', PROMPTS, PRIORITIES)
  check_stream(LEASE_SIGNALS)
  return redis.call('ZCARD', PENDING), redis.call('ZCARD', SUBMITTED)
end

-- The label of a reason in a hash of counts is its first word.
local function label_of(reason)
  return string.match(reason, '^[%w_]+') or 'other'
end

-- Fails if one of these prompts could not be leased, returned, queued, forgotten or dead-lettered for this reason. It
-- checks more than most scripts need: scripts that run for every prompt check what they need themselves.
local function check_prompts(ids, reason)
  check('HLEN', PROMPTS, ATTEMPTS, FAILURES, PRIORITIES, OWNERS, REFUNDS, META)
  check('ZCARD', PENDING, LEASES, OPEN, READY, READY_BY_VERSION)
  check('SCARD', RETURNED, DELIVERED)
  for _, stream in ipairs({LEASE_SIGNALS, RESULTS, DEAD}) do check_stream(stream) end
  for _, bitmap in ipairs({TRAINED, DEAD_LETTERED}) do redis.call('GETBIT', bitmap, 0) end
  numbers(COUNTERS, 'queued_bytes', 'admitted', 'admission', 'expired', 'discarded', 'dead_lettered')
  numbers(DEAD_REASONS, label_of(reason))
  for _, key in ipairs({ATTEMPTS, FAILURES, PRIORITIES}) do
    for i, value in ipairs(ask_many('HMGET', key, ids)) do integer(key, ids[i], value or '0') end
  end
  check_saved(ids)
end

-- Each attempt has its own payload key, so a late duplicate never overwrites a group that was delivered.
local function group_key(id, attempt)
  return GROUP .. id .. ':' .. attempt
end

local function in_flight()
  return redis.call('ZCARD', LEASES) + redis.call('SCARD', RETURNED)
end

local function queued()
  return redis.call('ZCARD', READY) + redis.call('SCARD', DELIVERED)
end

-- A higher priority comes first, then the older prompt. A prompt that expired stands where it stood before.
local function pending_score(priority, id)
  return -tonumber(priority) * 1e12 + id
end

local function make_pending(id)
  redis.call('ZADD', PENDING, pending_score(redis.call('HGET', PRIORITIES, id) or '0', id), id)
end

-- `places` are the positions of payloads in ARGV. The priority of each follows it. The prompts get the next ids, in
-- order.
local function add_prompts(places, num_pending, num_submitted)
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
  call_many('HSET', PRIORITIES, priorities)
  call_many('ZADD', PENDING, pending)
  redis.call('ZADD', SUBMITTED, before + 1, now_ms() .. ':' .. before + 1)
  if num_submitted >= MAX_SUBMITTED then redis.call('ZREMRANGEBYRANK', SUBMITTED, 0, 0) end
  -- Servers that wait although there were prompts wait for room. More prompts would wake all of them for nothing.
  if num_pending == 0 then signal_lease() end
end

-- Ends a lease, with the payloads that may be there of its attempt and earlier ones: the payload of an append whose script
-- failed, or whose producer died before it could send the script, has no group.
local function drop_lease(id)
  for attempt = 1, tonumber(redis.call('HGET', ATTEMPTS, id)) or 0 do redis.call('UNLINK', group_key(id, attempt)) end
  redis.call('HDEL', OWNERS, id)
  return redis.call('ZREM', LEASES, id)
end

-- The entry of a queued group in `meta`. Only write_meta and read_meta know its form.
local function write_meta(attempt, num_bytes, admission, min_version, appended_ms)
  return attempt .. ' ' .. num_bytes .. ' ' .. admission .. ' ' .. min_version .. ' ' .. appended_ms
end

-- Returns attempt, num_bytes, admission, min_version and appended_ms, all as text.
local function read_meta(text)
  return string.match(text, '^(%d+) (%d+) (%d+) (%-?%d+) ?(%d*)$')
end

-- Returns attempt and num_bytes only, in half the time.
local function read_meta_start(text)
  return string.match(text, '^(%d+) (%d+)')
end

-- Returns the attempt only, faster still.
local function read_meta_attempt(text)
  return string.match(text, '^(%d+) %d')
end

-- read_meta for the group of a prompt; nil if it has no queued group.
local function group_meta(id)
  local text = redis.call('HGET', META, id)
  if text then return read_meta(text) end
end

-- append writes `ready_by_version` only if groups are taken by version, because it costs as much as all else that is
-- written of a group. If the order was changed since, it is completed here.
local function complete_ready_by_version()
  if redis.call('ZCARD', READY_BY_VERSION) == redis.call('ZCARD', READY) then return end
  local ids, versions = redis.call('ZRANGE', READY, 0, -1), {}
  for i, text in ipairs(ask_many('HMGET', META, ids)) do
    local _, _, _, min_version = read_meta(text)
    if not min_version then error(META .. ' ' .. ids[i] .. ' is not an entry: ' .. text) end
    versions[2 * i - 1], versions[2 * i] = min_version, ids[i]
  end
  call_many('ZADD', READY_BY_VERSION, versions)
end

local function leave_ready_by_version(ids)
  if redis.call('ZCARD', READY_BY_VERSION) > 0 then call_many('ZREM', READY_BY_VERSION, ids) end
end

-- Whether a group was taken. Fails if it could not become ready again.
local function is_delivered(id)
  if redis.call('SISMEMBER', DELIVERED, id) == 0 then return false end
  return group_meta(id) and true or error(META .. ' ' .. id .. ' is not an entry')
end

-- Makes a group ready again, if it is delivered.
local function make_ready(id)
  if redis.call('SREM', DELIVERED, id) == 0 then return end
  local _, num_bytes, admission, min_version = group_meta(id)
  redis.call('ZADD', READY, admission, id)
  redis.call('ZADD', READY_BY_VERSION, min_version, id)
  count('queued_bytes', num_bytes)
end

-- Removes a group that was taken from the manifest that holds it. A prompt that left a step unfinished may be generated
-- and taken again for a later one; if the first manifest still listed it, closing that step would take it from the
-- second. The text is searched as a whole, because a step may have thousands of groups.
local function leave_manifest(id)
  local manifests, word = redis.call('HGETALL', MANIFESTS), ' ' .. id .. ' '
  for i = 1, #manifests, 2 do
    local text = ' ' .. manifests[i + 1] .. ' '
    local first, last = string.find(text, word, 1, true)
    if first then
      local rest = string.match(string.sub(text, 1, first) .. string.sub(text, last + 1), '^ *(.-) *$')
      if rest == '' then redis.call('HDEL', MANIFESTS, manifests[i]) else redis.call('HSET', MANIFESTS, manifests[i], rest) end
    end
  end
end

-- Removes a queued group from every place and returns the key of its payload; nil if there is no group.
local function remove_group(id)
  local attempt, num_bytes = group_meta(id)
  if not attempt then return nil end
  redis.call('HDEL', META, id)
  redis.call('ZREM', READY_BY_VERSION, id)
  if redis.call('ZREM', READY, id) == 1 then count('queued_bytes', -num_bytes) end
  if redis.call('SREM', DELIVERED, id) == 1 then leave_manifest(id) end
  signal_lease()
  return group_key(id, attempt)
end

local function next_admission()
  return redis.call('HINCRBY', COUNTERS, 'admission', 1)
end

-- Removes a prompt from every place before its group counts as queued, trained or dead, and returns the number of its
-- admission. A prompt without an admission (it had expired and was pending again, or Redis lost its tail) is admitted
-- here.
local function release_admission(id)
  local was_leased = drop_lease(id) == 1
  local was_returned = redis.call('SREM', RETURNED, id) == 1
  redis.call('ZREM', PENDING, id)
  if not was_leased and not was_returned then count('admitted', 1) end
  local admission = redis.call('ZSCORE', OPEN, id) or next_admission()
  redis.call('ZREM', OPEN, id)
  return admission
end

-- The hashes that have entries of prompts. Most prompts are in the first two only.
local function prompt_hashes()
  local keys = {PROMPTS, ATTEMPTS}
  for _, key in ipairs({FAILURES, REFUNDS, PRIORITIES}) do
    if redis.call('HLEN', key) > 0 then keys[#keys + 1] = key end
  end
  return keys
end

local function forget_prompts(ids, hashes)
  drop_all_saved(ids)
  for _, key in ipairs(hashes or prompt_hashes()) do call_many('HDEL', key, ids) end
end

-- Adds an entry to `results`. `what` is queued (ids: 'id:attempt id:attempt ...'), dead or cancelled (ids: one id).
-- Returns the id of the entry, which begins with the time in ms.
local function record_result(what, ids, reason)
  return redis.call('XADD', RESULTS, 'MAXLEN', '~', MAX_RESULTS, '*', what, ids, 'reason', reason)
end

-- State, attempt and payload of a prompt. An unknown prompt has no state.
local function prompt_state(id)
  if redis.call('GETBIT', TRAINED, id) == 1 then return 'trained', 0, '' end
  local payload = redis.call('HGET', PROMPTS, id)
  if not payload then
    if redis.call('GETBIT', DEAD_LETTERED, id) == 1 then return 'dead_lettered', 0, '' end
    if redis.call('GETBIT', CANCELLED, id) == 1 then return 'cancelled', 0, '' end
    return nil
  end
  local attempt = tonumber(redis.call('HGET', ATTEMPTS, id) or '0')
  if redis.call('HEXISTS', META, id) == 1 then return 'queued', attempt, payload end
  if redis.call('ZSCORE', LEASES, id) or redis.call('ZSCORE', EVAL_LEASES, id) then return 'leased', attempt, payload end
  return 'pending', attempt, payload
end

-- Moves a prompt, with the payload of its group if there is one, to the dead letters.
local function dead_letter(id, reason, payload)
  redis.call('XADD', DEAD, '*', 'prompt_id', id, 'reason', reason, 'prompt', redis.call('HGET', PROMPTS, id) or '',
    'group', payload or '')
  redis.call('SETBIT', DEAD_LETTERED, id, 1)
  redis.call('HINCRBY', DEAD_REASONS, label_of(reason), 1)
  count('dead_lettered', 1)
  record_result('dead', id, reason)
  forget_prompts({id})
end

-- Ends a lease that brought no group. A failure that is not empty counts towards max_attempts; at the limit the prompt
-- is dead-lettered. Otherwise the prompt keeps its admission and goes to the front, because groups that were admitted
-- after it may be waiting for its group.
local function return_prompt(id, failure, max_attempts)
  drop_lease(id)
  signal_lease()
  if failure ~= '' and redis.call('HINCRBY', FAILURES, id, 1) >= max_attempts then
    redis.call('ZREM', OPEN, id)
    dead_letter(id, failure)
    return
  end
  redis.call('SADD', RETURNED, id)
  redis.call('ZADD', PENDING, '-inf', id)
end

-- Keeps the newest score of a benchmark and, under its name with a number at the end, its history. Each benchmark is a
-- metric's label, so only MAX_BENCHMARKS are kept. Details (pass@k, parts of rewards) are kept only while there are fewer
-- than MAX_DETAIL_… in all, so that there is always room for 256 benchmarks and 5,000 scores.
local MAX_BENCHMARKS, MAX_DETAIL_BENCHMARKS = 320, 64
local MAX_SCORES, MAX_DETAIL_SCORES = 8000, 3000
local function keep_score(benchmark, numbered, score, is_detail)
  local max_benchmarks = is_detail and MAX_DETAIL_BENCHMARKS or MAX_BENCHMARKS
  if redis.call('HEXISTS', SCORES, benchmark) == 1 or redis.call('HLEN', SCORES) < max_benchmarks then
    redis.call('HSET', SCORES, benchmark, score)
  end
  local num_digits, max_scores = #numbered - #benchmark - 1, is_detail and MAX_DETAIL_SCORES or MAX_SCORES
  if num_digits > 0 and num_digits < 16 and redis.call('HLEN', SCORE_HISTORY) < max_scores then
    redis.call('HSET', SCORE_HISTORY, numbered, score)
  end
end

-- Fails if one of these held-out prompts could not be leased, returned or finished.
local function check_evaluations(ids)
  check('HLEN', EVAL_OF, SCORES, SCORE_HISTORY)
  check('ZCARD', EVAL_PENDING, EVAL_LEASES)
  for _, id in ipairs(ids) do
    local evaluation_id = redis.call('HGET', EVAL_OF, id) or error(EVAL_OF .. ' ' .. id .. ' is missing')
    numbers(EVALUATION .. evaluation_id, 'num_finished', 'num_prompts', 'num_samples', 'num_failed')
    check_float(EVALUATION .. evaluation_id, 'reward_sum')
  end
  check_prompts(ids, '')
end

-- Counts a prompt of an evaluation as finished. A complete evaluation can be read for a week. If it is one of the run or
-- an operator, its score is kept under its benchmark, which is its id without the number at the end.
local function finish_evaluation_prompt(evaluation_id)
  local evaluation = EVALUATION .. evaluation_id
  local num_finished = redis.call('HINCRBY', evaluation, 'num_finished', 1)
  local fields = redis.call('HMGET', evaluation, 'num_prompts', 'num_samples', 'reward_sum', 'is_kept')
  local num_prompts, num_samples, sum, is_kept = unpack(fields)
  if num_finished ~= tonumber(num_prompts) then return end
  redis.call('EXPIRE', evaluation, 604800)
  if num_samples == '0' or is_kept == '0' then return end
  local benchmark = string.match(evaluation_id, '^(.*)%-%d+$') or evaluation_id
  keep_score(benchmark, evaluation_id, tostring(sum / num_samples))
end

-- Counts a held-out prompt as finished, without samples, so that its evaluation ends.
local function fail_evaluation_prompt(id)
  local evaluation_id = redis.call('HGET', EVAL_OF, id)
  redis.call('HINCRBY', EVALUATION .. evaluation_id, 'num_failed', 1)
  finish_evaluation_prompt(evaluation_id)
  redis.call('HDEL', EVAL_OF, id)
  forget_prompts({id})
end

-- The prompts of an evaluation that wait.
local function waiting_prompts(evaluation_id)
  local ids = {}
  for _, id in ipairs(redis.call('ZRANGE', EVAL_PENDING, 0, -1)) do
    if redis.call('HGET', EVAL_OF, id) == evaluation_id then ids[#ids + 1] = id end
  end
  return ids
end

-- Ends an evaluation that no server can answer: its prompts that wait count as finished, without samples.
local function abandon_evaluation(evaluation_id)
  for _, id in ipairs(waiting_prompts(evaluation_id)) do
    redis.call('ZREM', EVAL_PENDING, id)
    fail_evaluation_prompt(id)
  end
end

-- Ends a lease of a held-out prompt that brought no rewards. At max_attempts the prompt has failed.
local function return_evaluation(id, failure, max_attempts)
  redis.call('ZREM', EVAL_LEASES, id)
  redis.call('HDEL', OWNERS, id)
  if failure ~= '' and redis.call('HINCRBY', FAILURES, id, 1) >= max_attempts then
    fail_evaluation_prompt(id)
    return
  end
  redis.call('ZADD', EVAL_PENDING, id, id)
  signal_lease()
end

-- Returns the newest prompt id that Redis can no longer lose. Only such prompts are leased: ids come from a counter,
-- which goes back when Redis loses its tail, and an id that a server or a ledger knows must never stand for another
-- prompt. 'awaited_id' was the newest id at 'awaited_ms'. It becomes 'durable_id' after `loss_window_ms`, the time that
-- Redis may lose. Also returns the newest id of all, and the counters that have changed, for the script to store.
local function newest_durable_id(now, loss_window_ms)
  local newest, known_id, awaited_id, awaited_ms = numbers(
    COUNTERS, 'next_prompt_id', 'durable_id', 'awaited_id', 'awaited_ms')
  local durable_id, changed = known_id, {}
  if awaited_id > durable_id and now - awaited_ms >= loss_window_ms then durable_id = awaited_id end
  if newest > durable_id and awaited_id <= durable_id then
    changed = {'awaited_id', newest, 'awaited_ms', now}
    if loss_window_ms == 0 then durable_id = newest end
  end
  if durable_id > known_id then changed[#changed + 1], changed[#changed + 2] = 'durable_id', durable_id end
  return durable_id, newest, changed
end
