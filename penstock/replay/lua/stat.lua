-- One consistent look. The order is that of QueueStat's fields.
local now = now_ms()

-- Milliseconds since the prompt that is next in line was submitted. Of more submissions than are remembered, at least.
local function pending_age()
  local head = redis.call('ZRANGE', PENDING, 0, 0)[1]
  if not head then return 0 end
  local mark = redis.call('ZREVRANGEBYSCORE', SUBMITTED, head, '-inf', 'LIMIT', 0, 1)[1]
  mark = mark or redis.call('ZRANGE', SUBMITTED, 0, 0)[1]
  return mark and math.max(0, now - tonumber(string.match(mark, '^%d+'))) or 0
end

-- Milliseconds since the group that is next in line was handed in.
local function ready_age()
  local head = redis.call('ZRANGE', READY, 0, 0)[1]
  local time = head and string.match(redis.call('HGET', META, head), '^%d+ %d+ %d+ %-?%d+ (%d+)$')
  return time and math.max(0, now - tonumber(time)) or 0
end

return {
  redis.call('ZCARD', PENDING), counter('admitted'), in_flight(), queued(), redis.call('SCARD', DELIVERED),
  counter('queued_bytes'), counter('trained'), counter('expired'), counter('dead_lettered'), counter('redelivered'),
  counter('reclaimed'), counter('discarded'), counter('inserted'), counter('step'), counter('policy_version'),
  counter('term'), pending_age(), ready_age(),
}
