-- The circuit breaker of each server: penstock/replay/breaker.py describes it. `breakers` holds a record for each server
-- that has failed since its last success.
local MIN_PROMPTS, MAX_SPARED, MAX_WAIT_MS = 3, 3, 60000

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

-- Takes the failures of an opened breaker back from its prompts, and marks these as tried. The newest failure of
-- `newest` was not counted yet. While no group at all is accepted, the prompts are not at fault, and breakers that open
-- one after the other count once.
local function spare_prompts(breaker, newest)
  local accepted = counter('inserted')
  for id, failures in pairs(breaker.prompts) do
    if id == newest then failures = failures - 1 end
    if redis.call('HEXISTS', PROMPTS, id) == 1 then
      local num_spared, accepted_before = read_spared(id)
      if accepted ~= accepted_before then redis.call('HSET', SPARED, id, (num_spared + 1) .. ' ' .. accepted) end
      if failures > 0 and redis.call('HINCRBY', FAILURES, id, -failures) <= 0 then redis.call('HDEL', FAILURES, id) end
    end
    breaker.prompts[id] = 0
  end
end

-- Records that a lease of `server` failed. `limits` has failures, non_finite_failures and probe_ms. Returns what this
-- means for the prompt: counted, kept, spared or opened.
local function record_failure(server, id, reason, num_running, limits)
  if limits.failures == 0 or read_spared(id) >= MAX_SPARED then return 'counted' end
  local breaker = read_breaker(server) or {failures = 0, non_finite = 0, prompts = {}, opened_ms = 0}
  breaker.reason, breaker.failures = reason, breaker.failures + 1
  breaker.failed_evaluation = redis.call('HEXISTS', EVAL_OF, id) == 1
  if reason == 'non_finite' then breaker.non_finite = breaker.non_finite + 1 end
  local verdict = 'spared'
  if breaker.opened_ms > 0 then
    breaker.prompts[id] = 0
  else
    breaker.prompts[id] = (breaker.prompts[id] or 0) + 1
    local num_prompts = 0
    for _ in pairs(breaker.prompts) do num_prompts = num_prompts + 1 end
    if num_prompts < MIN_PROMPTS or 2 * num_prompts < num_running then
      verdict = 'counted'
    elseif breaker.failures < limits.failures and breaker.non_finite < limits.non_finite_failures then
      verdict = 'kept'
    else
      verdict = 'opened'
      spare_prompts(breaker, id)
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
    if server then redis.call('HDEL', BREAKERS, server) end
  end
end

local function may_probe(breaker, now)
  return now >= breaker.probe_ms or counter('policy_version') ~= breaker.policy_version
end

-- Notes that a server with an open breaker asked for a probe. If all prompts in line were tried before, the tries begin
-- anew.
local function record_probe(server, breaker, was_leased, has_tried_all, now, first_wait_ms)
  if has_tried_all then breaker.prompts = {} end
  if was_leased then
    local version = counter('policy_version')
    local is_new = version ~= breaker.policy_version
    breaker.wait_ms = is_new and first_wait_ms or math.min(2 * breaker.wait_ms, math.max(MAX_WAIT_MS, first_wait_ms))
    breaker.probe_ms, breaker.policy_version = now + breaker.wait_ms, version
  end
  if was_leased or has_tried_all then write_breaker(server, breaker) end
end
