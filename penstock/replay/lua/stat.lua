-- Returns the fields of QueueStat by name, all of the same moment.
local now = now_ms()

-- Milliseconds since the next prompt in line was submitted. A lower bound if that submission is no longer remembered.
local function pending_age()
  local head = redis.call('ZRANGE', PENDING, 0, 0)[1]
  if not head then return 0 end
  local mark = redis.call('ZREVRANGEBYSCORE', SUBMITTED, head, '-inf', 'LIMIT', 0, 1)[1]
  mark = mark or redis.call('ZRANGE', SUBMITTED, 0, 0)[1]
  return mark and math.max(0, now - tonumber(string.match(mark, '^%d+'))) or 0
end

-- Milliseconds since the next group in line was appended.
local function ready_age()
  local head = redis.call('ZRANGE', READY, 0, 0)[1]
  if not head then return 0 end
  local _, _, _, _, appended_ms = group_meta(head)
  return math.max(0, now - (tonumber(appended_ms) or now))
end

return {
  'pending_prompts', redis.call('ZCARD', PENDING),
  'admitted', counter('admitted'),
  'in_flight', in_flight(),
  'queued', queued(),
  'delivered', redis.call('SCARD', DELIVERED),
  'queued_bytes', counter('queued_bytes'),
  'trained', counter('trained'),
  'expired', counter('expired'),
  'dead_lettered', counter('dead_lettered'),
  'redelivered', counter('redelivered'),
  'reclaimed', counter('reclaimed'),
  'discarded', counter('discarded'),
  'inserted', counter('inserted'),
  'saved_bytes', counter('saved_bytes'),
  'step', counter('step'),
  'admission_base', counter('admission_base'),
  'committed_step', counter('committed_step'),
  'policy_version', counter('policy_version'),
  'term', counter('term'),
  'finished_step', tonumber(redis.call('HGET', COUNTERS, 'finished_step') or '-1'),
  'pending_age_ms', pending_age(),
  'ready_age_ms', ready_age(),
}
