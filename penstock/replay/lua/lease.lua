-- ARGV: server, max prompts, ttl ms, groups per step, max staleness, capacity bytes, max attempts, loss window ms,
-- the breaker's first wait for a probe in ms (0: no breaker).
-- Takes back leases that ran out, then leases prompts. Returns a row for each lease.
local server, wanted, now = ARGV[1], tonumber(ARGV[2]), now_ms()
local COLUMNS = {'prompt_id', 'attempt', 'payload'}
local expiry = now + tonumber(ARGV[3])
run_when_full()

for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, 256)) do
  count('reclaimed', 1)
  return_prompt(id, 'lease_expired', tonumber(ARGV[7]))
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', EVAL_LEASES, '-inf', now, 'LIMIT', 0, 256)) do
  return_evaluation(id, 'lease_expired', tonumber(ARGV[7]))
end

if counter('paused') == 1 or redis.call('SISMEMBER', DRAINED, server) == 1 then return rows(COLUMNS, {}) end

-- A server in quarantine (penstock/store/fleet.py) leases its probes and nothing else.
local quarantine = redis.call('HGET', QUARANTINED, server)
quarantine = quarantine and cjson.decode(quarantine)
if quarantine then
  wanted = math.min(wanted, quarantine.probes_left)
  if wanted <= 0 then return rows(COLUMNS, {}) end
end

-- A server leases the prompts that have not failed on it since its last success before those that have. While its
-- breaker is open, it leases one at a time.
local failures = tonumber(ARGV[9]) > 0 and redis.call('EXISTS', BREAKERS) == 1 and read_breaker(server) or nil
local breaker = failures and failures.opened_ms > 0 and failures
local has_pins = redis.call('EXISTS', POLICY_PINS) == 1
local is_pinned = has_pins and redis.call('HEXISTS', POLICY_PINS, server) == 1
if breaker then
  if not may_probe(breaker, is_pinned, now) then return rows(COLUMNS, {}) end
  wanted = math.min(wanted, 1)
end
local skipped = failures and failures.prompts or {}

-- Upper bound on the prompts that one call skips because Redis may still lose them.
local MAX_SKIPPED = 1024
local newest, durable_id = counter('next_prompt_id'), newest_durable_id(now, tonumber(ARGV[8]))

-- Leases the prompts in few commands: each costs time and an entry in the append-only file.
local leased = {}
local function grant(ids, leases)
  if #ids == 0 then return end
  local attempts, payloads = ask_many('HMGET', ATTEMPTS, ids), ask_many('HMGET', PROMPTS, ids)
  local counted, expiries, owners = {}, {}, {}
  for i, id in ipairs(ids) do
    local attempt, last = (attempts[i] or 0) + 1, #leased
    counted[2 * i - 1], counted[2 * i] = id, attempt
    expiries[2 * i - 1], expiries[2 * i] = expiry, id
    owners[2 * i - 1], owners[2 * i] = id, server .. '/' .. attempt
    leased[last + 1], leased[last + 2], leased[last + 3] = tonumber(id), attempt, payloads[i]
  end
  call_many('HSET', ATTEMPTS, counted)
  call_many('ZADD', leases, expiries)
  call_many('HSET', OWNERS, owners)
end

-- A held-out prompt whose evaluation is pinned to a version is leased only to a server that has reported this version.
-- A server that is pinned itself leases nothing else.
local MAX_PINNED_SKIPPED = 256
local version
local function may_answer(id)
  local pinned = has_pins and redis.call('HGET', POLICY_PINS, redis.call('HGET', EVAL_OF, id) or '')
  if not pinned then return not is_pinned end
  local record = not version and redis.call('HGET', SERVERS, server)
  version = version or (record and tonumber(cjson.decode(record)['policy_version'])) or -1
  return tonumber(pinned) == version
end

local function lease_evaluations(most)
  if quarantine or most <= 0 then return end
  local looked_at, chosen = most + ((has_pins or failures) and MAX_PINNED_SKIPPED or 0), {}
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', EVAL_PENDING, '-inf', durable_id, 'LIMIT', 0, looked_at)) do
    if #chosen < most and may_answer(id) and not skipped[id] then chosen[#chosen + 1] = id end
  end
  call_many('ZREM', EVAL_PENDING, chosen)
  grant(chosen, EVAL_LEASES)
  wanted = wanted - #chosen
end

local function admit(ids)
  if #ids == 0 then return end
  count('admitted', #ids)
  local before, numbers = redis.call('HINCRBY', COUNTERS, 'admission', #ids) - #ids, {}
  for i, id in ipairs(ids) do numbers[2 * i - 1], numbers[2 * i] = before + i, id end
  call_many('ZADD', OPEN, numbers)
end

local limit = counter('admission_base') + (tonumber(ARGV[5]) + counter('step') + 1) * tonumber(ARGV[4])
local function lease_prompts()
  if wanted <= 0 or is_pinned then return end
  local room = limit - (counter('trained') + queued() + in_flight())
  if counter('queued_bytes') >= tonumber(ARGV[6]) then room = 0 end
  local window = wanted + math.min(newest - durable_id, MAX_SKIPPED) + (failures and MAX_SKIPPED or 0)
  local has_returned, chosen, admitted = redis.call('SCARD', RETURNED) > 0, {}, {}
  for _, id in ipairs(redis.call('ZRANGE', PENDING, 0, window - 1)) do
    if #chosen == wanted then break end
    if tonumber(id) <= durable_id and not skipped[id] then
      -- A returned prompt counts in in_flight already, so it needs no room.
      if not has_returned or redis.call('SREM', RETURNED, id) == 0 then
        if #admitted >= room then break end
        admitted[#admitted + 1] = id
      end
      chosen[#chosen + 1] = id
    end
  end
  admit(admitted)
  call_many('ZREM', PENDING, chosen)
  grant(chosen, LEASES)
  wanted = wanted - #chosen
end

-- Held-out prompts and training prompts share the places, so that training goes on during a validation: held-out
-- prompts come first, until as many of them as of the others are leased. Either kind takes what the other leaves.
-- A probe takes a held-out prompt first, but after one of them has failed it prefers the other kind.
local function lease_all()
  local share = wanted
  if breaker and breaker.failed_evaluation then lease_prompts() end
  if not breaker then
    share = math.ceil((wanted + redis.call('ZCARD', LEASES) - redis.call('ZCARD', EVAL_LEASES)) / 2)
  end
  lease_evaluations(math.min(share, wanted))
  lease_prompts()
  lease_evaluations(wanted)
end
lease_all()
local has_tried_all = wanted > 0 and next(skipped) ~= nil
if has_tried_all then
  skipped = {}
  lease_all()
end
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
