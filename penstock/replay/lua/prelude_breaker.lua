-- The circuit breaker of each server: penstock/replay/breaker.py describes it. `breakers` holds a record for each server
-- that has failed since its last success.
local MIN_PROMPTS, MAX_SPARED, MAX_PROBES, MAX_WAIT_MS = 3, 3, 3, 60000

local function read_breaker(server)
  local text = redis.call('HGET', BREAKERS, server)
  return text and cjson.decode(text)
end

local function write_breaker(server, breaker)
  redis.call('HSET', BREAKERS, server, cjson.encode(breaker))
end

-- How many opened breakers have spared a prompt, and the number of accepted groups at the last of them.
local function read_spared(id)
  local num_spared, num_accepted = string.match(redis.call('HGET', SPARED, id) or '', '^(%d+) (%d+)$')
  return tonumber(num_spared or 0), tonumber(num_accepted or -1)
end

-- Forgets the failures of an opened breaker, and marks its prompts as tried. While no group at all is accepted, the
-- prompts are not at fault, and breakers that open one after the other count once.
local function spare_prompts(breaker)
  local accepted = counter('inserted')
  for id in pairs(breaker.prompts) do
    if redis.call('HEXISTS', PROMPTS, id) == 1 then
      local num_spared, accepted_before = read_spared(id)
      if accepted ~= accepted_before then redis.call('HSET', SPARED, id, (num_spared + 1) .. ' ' .. accepted) end
    end
    breaker.prompts[id] = 0
  end
  breaker.due = {}
end

-- Counts the failures of a server that has succeeded since: they were the prompts' own.
local function count_failures(breaker)
  for id, failures in pairs(breaker.prompts) do
    if failures > 0 and redis.call('HEXISTS', PROMPTS, id) == 1 then
      local total, reason = redis.call('HINCRBY', FAILURES, id, failures), breaker.due and breaker.due[id]
      if reason and total >= breaker.max_attempts then
        if redis.call('SREM', RETURNED, id) == 1 then
          redis.call('ZREM', PENDING, id)
          redis.call('ZREM', OPEN, id)
          bury(id, reason)
          signal_lease()
        elseif redis.call('ZREM', EVAL_PENDING, id) == 1 then
          fail_evaluation_prompt(id)
        end
      end
    end
  end
end

-- Whether a server that has failed has no other prompt to try.
local function is_alone(num_running)
  return num_running == 0 and redis.call('ZCARD', PENDING) == 0 and redis.call('ZCARD', EVAL_PENDING) == 0
end

-- Whether another server that is pinned to the same version may still answer.
local REPORTED_MS = 60000
local function has_pinned_peer(server)
  local version = redis.call('HGET', POLICY_PINS, server)
  for _, text in ipairs(redis.call('HVALS', SERVERS)) do
    local peer = cjson.decode(text)
    if peer.server_id ~= server and redis.call('HGET', POLICY_PINS, peer.server_id) == version
        and now_ms() - peer.heartbeat_ms < REPORTED_MS then
      local breaker = read_breaker(peer.server_id)
      if not breaker or breaker.opened_ms == 0 then return true end
    end
  end
  return false
end

-- A failure while the breaker is open. A pinned server tries nothing but its evaluation.
local function fail_probe(server, breaker, id)
  breaker.prompts[id] = 0
  if not breaker.failed_evaluation or (breaker.num_probes or 0) < MAX_PROBES then return 'spared' end
  if redis.call('HEXISTS', POLICY_PINS, server) == 0 or has_pinned_peer(server) then return 'spared' end
  breaker.num_probes = 0
  return 'given_up'
end

-- Records that a lease of `server` failed. `limits` has failures, non_finite_failures, probe_ms and max_attempts.
-- Returns what this means for the prompt: counted, kept, spared, opened or given_up.
local function record_failure(server, id, reason, num_running, limits)
  if limits.failures == 0 or read_spared(id) >= MAX_SPARED then return 'counted' end
  local breaker = read_breaker(server) or {failures = 0, non_finite = 0, prompts = {}, opened_ms = 0}
  breaker.due, breaker.max_attempts = breaker.due or {}, limits.max_attempts
  breaker.reason, breaker.failures = reason, breaker.failures + 1
  breaker.failed_evaluation = redis.call('HEXISTS', EVAL_OF, id) == 1
  if reason == 'non_finite' then breaker.non_finite = breaker.non_finite + 1 end
  local verdict = 'kept'
  if breaker.opened_ms > 0 then
    verdict = fail_probe(server, breaker, id)
  else
    local failures, num_prompts = (breaker.prompts[id] or 0) + 1, 0
    breaker.prompts[id], breaker.due[id] = failures, nil
    for _ in pairs(breaker.prompts) do num_prompts = num_prompts + 1 end
    if num_prompts < MIN_PROMPTS or 2 * num_prompts < num_running then
      local total = tonumber(redis.call('HGET', FAILURES, id) or 0) + failures
      if total >= limits.max_attempts and (failures > 1 or is_alone(num_running)) then
        verdict, breaker.prompts[id] = 'counted', 0
        redis.call('HINCRBY', FAILURES, id, failures - 1)
      else
        breaker.due[id] = reason
      end
    elseif breaker.failures >= limits.failures or breaker.non_finite >= limits.non_finite_failures then
      verdict = 'opened'
      spare_prompts(breaker)
      breaker.opened_ms, breaker.wait_ms, breaker.policy_version = now_ms(), limits.probe_ms, counter('policy_version')
      breaker.probe_ms = breaker.opened_ms + limits.probe_ms
    end
  end
  write_breaker(server, breaker)
  return verdict
end

-- Closes the breakers of the servers that hold these leases ('server/attempt').
local function record_successes(owners)
  for _, owner in ipairs(owners) do
    local server = owner and string.match(owner, '^(.*)/%d+$')
    local breaker = server and read_breaker(server)
    if breaker then
      redis.call('HDEL', BREAKERS, server)
      count_failures(breaker)
    end
  end
end

-- A pinned server stays at its version, so a new one is no reason to probe.
local function has_new_version(breaker, is_pinned)
  return not is_pinned and counter('policy_version') ~= breaker.policy_version
end

local function may_probe(breaker, is_pinned, now)
  return now >= breaker.probe_ms or has_new_version(breaker, is_pinned)
end

-- Notes that a server with an open breaker asked for a probe. If all prompts in line were tried before, the tries begin
-- anew.
local function record_probe(server, breaker, is_pinned, was_leased, has_tried_all, now, first_wait_ms)
  if has_tried_all then breaker.prompts = {} end
  if was_leased then
    local is_new = has_new_version(breaker, is_pinned)
    breaker.wait_ms = is_new and first_wait_ms or math.min(2 * breaker.wait_ms, math.max(MAX_WAIT_MS, first_wait_ms))
    breaker.probe_ms, breaker.policy_version = now + breaker.wait_ms, counter('policy_version')
    breaker.num_probes = (breaker.num_probes or 0) + 1
  end
  if was_leased or has_tried_all then write_breaker(server, breaker) end
end
