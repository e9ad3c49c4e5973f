-- The circuit breaker of a rollout server: it pauses leasing while everything that the server tries fails.
--
-- Bad weights or a broken reward fail every prompt alike. Without a breaker, each prompt would use up its attempts
-- within seconds and go to the dead letters. The queue keeps one breaker per server, from the server's first failure to
-- its next success. A success is an accepted group or a finished evaluation prompt.
--
--     closed ──(failures reach a limit)──► open ──(a success, or an operator resumes the run)──► closed
--
-- A failure is at first kept in the breaker, because it is not known yet whether the server or the prompt is at fault.
-- If the server succeeds next, its failures count towards the prompts' attempts, and a prompt that has used them up is
-- dead-lettered. If the breaker opens, they are forgotten. So a prompt may be tried more often than `max_attempts`
-- times while servers fail. A prompt that fails while its server has no other one to try, or fails again while few
-- others do, is dead-lettered without a success.
--
-- It opens when, since the server's last success, `failures` leases failed, or `non_finite_failures` of them with the
-- reason `non_finite`. At least MIN_PROMPTS different prompts must have failed, and at least half as many as the server
-- works on, so that a few bad prompts do not open it. Then
--
-- - the server leases one prompt as a probe after `probe_s`, then after twice that time, up to MAX_WAIT_MS, and at once
--   whenever a new policy version is published. A probe prefers prompts that have not failed yet, and training prompts
--   after a held-out prompt has failed. Its failure does not count;
-- - the first success closes it;
-- - a server that is pinned to a version answers nothing but its evaluation. After MAX_PROBES probes the evaluation is
--   abandoned, unless another server is pinned to the same version: its prompts that wait count as finished, without
--   samples.
--
-- While many prompts fail and no limit is reached, no prompt is dead-lettered. A server first leases prompts that have
-- not failed on it since its last success, so that one prompt does not use up its attempts before others were tried. A
-- prompt whose failures were refunded MAX_REFUNDS times, while groups of other prompts were accepted in between, is treated
-- as bad itself: its failures count at once, and they do not open a breaker. An expired lease is not a failure here: it
-- tells that a server died, not why. Neither is a failure that is final, because it concerns only its prompt.
--
-- `breakers` holds a record for each server that has failed since its last success. tests/support/memory_store.py is the model
-- that the property test compares this with.
local MIN_PROMPTS, MAX_REFUNDS, MAX_PROBES, MAX_WAIT_MS = 3, 3, 3, 60000

local function read_breaker(server)
  local text = redis.call('HGET', BREAKERS, server)
  return text and cjson.decode(text)
end

local function write_breaker(server, breaker)
  redis.call('HSET', BREAKERS, server, cjson.encode(breaker))
end

-- How many opened breakers have refunded a prompt's failures, and the number of accepted groups at the last of them.
local function read_refunds(id)
  local num_refunds, num_accepted = string.match(redis.call('HGET', REFUNDS, id) or '', '^(%d+) (%d+)$')
  return tonumber(num_refunds or 0), tonumber(num_accepted or -1)
end

-- Forgets the failures of an opened breaker, and marks its prompts as tried. While no group at all is accepted, the
-- prompts are not at fault, and breakers that open one after the other count once.
local function refund_failures(breaker)
  local accepted = counter('inserted')
  for id in pairs(breaker.prompts) do
    if redis.call('HEXISTS', PROMPTS, id) == 1 then
      local num_refunds, accepted_before = read_refunds(id)
      if accepted ~= accepted_before then redis.call('HSET', REFUNDS, id, (num_refunds + 1) .. ' ' .. accepted) end
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
          dead_letter(id, reason)
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
  if not breaker.failed_evaluation or (breaker.num_probes or 0) < MAX_PROBES then return 'refunded' end
  if redis.call('HEXISTS', POLICY_PINS, server) == 0 or has_pinned_peer(server) then return 'refunded' end
  check_evaluations(waiting_prompts(redis.call('HGET', EVAL_OF, id)))
  breaker.num_probes = 0
  return 'abandoned'
end

-- Records that a lease of `server` failed. `limits` has failures, non_finite_failures, probe_ms and max_attempts.
-- Returns what this means for the prompt: counted, kept, refunded, opened or abandoned. Fails before its first write.
local function record_failure(server, id, reason, num_running, limits)
  if limits.failures == 0 or read_refunds(id) >= MAX_REFUNDS then return 'counted' end
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
      verdict, breaker.policy_version = 'opened', counter('policy_version')
      refund_failures(breaker)
      breaker.opened_ms, breaker.wait_ms = now_ms(), limits.probe_ms
      breaker.probe_ms = breaker.opened_ms + limits.probe_ms
    end
  end
  write_breaker(server, breaker)
  return verdict
end

-- The breakers of the servers that hold these leases ('server/attempt'), each after its server. Fails if close_breakers
-- would fail.
local function breakers_of(owners)
  local found, ids, held_out = {}, {}, {}
  for _, owner in ipairs(owners) do
    local server = owner and string.match(owner, '^(.*)/%d+$')
    local breaker = server and not found[server] and read_breaker(server)
    if breaker then
      found[server], found[#found + 1], found[#found + 2] = true, server, breaker
      for id in pairs(breaker.prompts) do
        ids[#ids + 1] = id
        if redis.call('HEXISTS', EVAL_OF, id) == 1 then held_out[#held_out + 1] = id end
        numbers(DEAD_REASONS, label_of(breaker.due and breaker.due[id] or ''))
      end
    end
  end
  if #found > 0 then
    check_prompts(ids, '')
    check_evaluations(held_out)
  end
  return found
end

-- Closes breakers because their servers have succeeded.
local function close_breakers(breakers)
  for i = 1, #breakers, 2 do
    redis.call('HDEL', BREAKERS, breakers[i])
    count_failures(breakers[i + 1])
  end
end

-- A pinned server stays at its version, so a new one is not a reason to probe.
local function has_new_version(breaker, is_pinned)
  return not is_pinned and counter('policy_version') ~= breaker.policy_version
end

local function may_probe(breaker, is_pinned, now)
  return now >= breaker.probe_ms or has_new_version(breaker, is_pinned)
end

-- Notes that a server with an open breaker asked for a probe. If all prompts in line were tried before, the tries begin
-- again.
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
