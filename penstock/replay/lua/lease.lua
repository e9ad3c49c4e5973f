-- ARGV: server, max prompts, ttl ms, groups per step, max staleness, capacity bytes, max attempts, loss window ms,
-- the breaker's first wait for a probe in ms (0: no breaker).
-- Takes back leases that ran out, then leases prompts. Returns a row for each lease.
local server, wanted, now = ARGV[1], tonumber(ARGV[2]), now_ms()
local COLUMNS = {'prompt_id', 'attempt', 'payload'}
local expiry = now + tonumber(ARGV[3])
run_when_full()

local expired = redis.call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, 256)
local expired_evaluations = redis.call('ZRANGEBYSCORE', EVAL_LEASES, '-inf', now, 'LIMIT', 0, 256)
local paused, queued_bytes, step, trained, num_admitted, admission, admission_base = numbers(
  COUNTERS, 'paused', 'queued_bytes', 'step', 'trained', 'admitted', 'admission', 'admission_base', 'reclaimed',
  'policy_version')
local durable_id, newest, changed = newest_durable_id(now, tonumber(ARGV[8]))
local is_barred = paused == 1 or redis.call('SISMEMBER', DRAINED, server) == 1

-- A server in quarantine (penstock/store/fleet.py) leases its probes and nothing else.
local quarantine = redis.call('HGET', QUARANTINED, server)
quarantine = quarantine and cjson.decode(quarantine)
if quarantine then
  wanted = math.min(wanted, quarantine.probes_left)
  is_barred = is_barred or wanted <= 0
end

-- A server leases the prompts that have not failed on it since its last success before those that have. While its
-- breaker is open, it leases one at a time.
local failures = tonumber(ARGV[9]) > 0 and redis.call('HLEN', BREAKERS) > 0 and read_breaker(server) or nil
local breaker = failures and failures.opened_ms > 0 and failures
local has_pins = redis.call('HLEN', POLICY_PINS) > 0
local is_pinned = has_pins and redis.call('HEXISTS', POLICY_PINS, server) == 1
if breaker then
  is_barred = is_barred or not may_probe(breaker, is_pinned, now)
  wanted = math.min(wanted, 1)
end
local skipped = failures and failures.prompts or {}

-- A held-out prompt whose evaluation is pinned to a version is leased only to a server that has reported this version.
-- A server that is pinned itself leases nothing else.
local record = has_pins and redis.call('HGET', SERVERS, server)
local version = record and tonumber(cjson.decode(record)['policy_version']) or -1
local function may_answer(id)
  local pinned = has_pins and redis.call('HGET', POLICY_PINS, redis.call('HGET', EVAL_OF, id) or '')
  if not pinned then return not is_pinned end
  return tonumber(pinned) == version
end

-- Upper bounds on the prompts that one call skips, because Redis may still lose them or because of pins and failures.
local MAX_SKIPPED, MAX_PINNED_SKIPPED = 1024, 256

if #expired + #expired_evaluations > 0 then
  local next_ids = redis.call('ZRANGE', PENDING, 0, wanted + 2 * MAX_SKIPPED)
  local next_evaluations = redis.call('ZRANGE', EVAL_PENDING, 0, wanted + MAX_PINNED_SKIPPED)
  for _, ids in ipairs({expired, next_ids, next_evaluations}) do check_prompts(ids, 'lease_expired') end
  check_evaluations(expired_evaluations)
end
for _, id in ipairs(expired) do
  count('reclaimed', 1)
  return_prompt(id, 'lease_expired', tonumber(ARGV[7]))
end
for _, id in ipairs(expired_evaluations) do return_evaluation(id, 'lease_expired', tonumber(ARGV[7])) end
if is_barred then return rows(COLUMNS, {}) end

-- Chooses first and writes afterwards. `admitted` are the chosen prompts that are not in flight yet.
local evaluations, prompts, admitted, is_chosen = {}, {}, {}, {}
local function choose_evaluations(most)
  if quarantine or most <= 0 then return end
  local last = #evaluations + most
  local looked_at = last + ((has_pins or failures) and MAX_PINNED_SKIPPED or 0)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', EVAL_PENDING, '-inf', durable_id, 'LIMIT', 0, looked_at)) do
    if #evaluations < last and not is_chosen[id] and may_answer(id) and not skipped[id] then
      evaluations[#evaluations + 1], is_chosen[id] = id, true
      wanted = wanted - 1
    end
  end
end

local num_leased, num_returned = redis.call('ZCARD', LEASES), redis.call('SCARD', RETURNED)
local limit = admission_base + (tonumber(ARGV[5]) + step + 1) * tonumber(ARGV[4])
local room = limit - (trained + queued() + num_leased + num_returned)
if queued_bytes >= tonumber(ARGV[6]) then room = 0 end
local function choose_prompts()
  if wanted <= 0 or is_pinned then return end
  local last = #prompts + wanted
  local window = last + math.min(newest - durable_id, MAX_SKIPPED) + (failures and MAX_SKIPPED or 0)
  for _, id in ipairs(redis.call('ZRANGE', PENDING, 0, window - 1)) do
    if #prompts == last then break end
    if tonumber(id) <= durable_id and not skipped[id] and not is_chosen[id] then
      -- A returned prompt counts in in_flight already, so it needs no room.
      if num_returned == 0 or redis.call('SISMEMBER', RETURNED, id) == 0 then
        if #admitted >= room then break end
        admitted[#admitted + 1] = id
      end
      prompts[#prompts + 1] = id
      if failures then is_chosen[id] = true end
    end
  end
  wanted = last - #prompts
end

-- Held-out prompts and training prompts share the places, so that training goes on during a validation: held-out
-- prompts come first, until as many of them as of the others are leased. Either kind takes what the other leaves.
-- A probe takes a held-out prompt first, but after one of them has failed it prefers the other kind.
local function choose_all()
  local share = wanted
  if breaker and breaker.failed_evaluation then choose_prompts() end
  if not breaker then
    local num_evaluations = redis.call('ZCARD', EVAL_LEASES) + #evaluations
    share = math.ceil((wanted + num_leased + #prompts - num_evaluations) / 2)
  end
  choose_evaluations(math.min(share, wanted))
  choose_prompts()
  choose_evaluations(wanted)
end
choose_all()
local has_tried_all = wanted > 0 and next(skipped) ~= nil
if has_tried_all then
  skipped = {}
  choose_all()
end

-- Leases the prompts in few commands: each costs time and an entry in the append-only file.
local leased, counted, owners = {}, {}, {}
local function read_leases(ids)
  local attempts, payloads, expiries = ask_many('HMGET', ATTEMPTS, ids), ask_many('HMGET', PROMPTS, ids), {}
  for i, id in ipairs(ids) do
    local attempt, place, last = (attempts[i] or 0) + 1, #counted, #leased
    counted[place + 1], counted[place + 2] = id, attempt
    owners[place + 1], owners[place + 2] = id, server .. '/' .. attempt
    expiries[2 * i - 1], expiries[2 * i] = expiry, id
    leased[last + 1], leased[last + 2], leased[last + 3] = tonumber(id), attempt, payloads[i]
  end
  return expiries
end
local evaluation_leases, leases = read_leases(evaluations), read_leases(prompts)
check('HLEN', OWNERS)
check('ZCARD', OPEN)
if quarantine then check_saved(prompts) end  -- it leases no held-out prompts

if #admitted > 0 then
  local places = {}
  for i, id in ipairs(admitted) do places[2 * i - 1], places[2 * i] = admission + i, id end
  for _, value in ipairs({'admitted', num_admitted + #admitted, 'admission', admission + #admitted}) do
    changed[#changed + 1] = value
  end
  call_many('ZADD', OPEN, places)
end
call_many('HSET', COUNTERS, changed)
if num_returned > 0 then call_many('SREM', RETURNED, prompts) end
call_many('ZREM', EVAL_PENDING, evaluations)
call_many('ZADD', EVAL_LEASES, evaluation_leases)
call_many('ZREM', PENDING, prompts)
call_many('ZADD', LEASES, leases)
call_many('HSET', ATTEMPTS, counted)
call_many('HSET', OWNERS, owners)
if breaker then record_probe(server, breaker, is_pinned, #leased > 0, has_tried_all, now, tonumber(ARGV[9])) end
if quarantine and #leased > 0 then
  for i = 1, #leased, 3 do
    quarantine.probes_left = quarantine.probes_left - 1
    quarantine.probe_ids = quarantine.probe_ids .. ' ' .. leased[i]
    drop_saved(leased[i])  -- a probe must be sampled by this server alone
  end
  redis.call('HSET', QUARANTINED, server, cjson.encode(quarantine))
end
return rows(COLUMNS, leased)
