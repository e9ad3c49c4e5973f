-- Returns the counts of all places at one moment, for an operator. Changes nothing.
local now, delivered_bytes = now_ms(), 0
for _, id in ipairs(redis.call('SMEMBERS', DELIVERED)) do
  local _, num_bytes = group_meta(id)
  delivered_bytes = delivered_bytes + (num_bytes or 0)
end
local manifests, first_step, first_delivered = redis.call('HGETALL', MANIFESTS), math.huge, 0
for i = 1, #manifests, 2 do
  for id in string.gmatch(manifests[i + 1], '%d+') do
    if tonumber(manifests[i]) < first_step and redis.call('SISMEMBER', DELIVERED, id) == 1 then
      first_step, first_delivered = tonumber(manifests[i]), tonumber(id)
    end
  end
end
local oldest_dead = redis.call('XRANGE', DEAD, '-', '+', 'COUNT', 1)[1]
return {
  'exists', redis.call('EXISTS', COUNTERS),
  'now_ms', now,
  'pending', redis.call('ZCARD', PENDING),
  'returned', redis.call('SCARD', RETURNED),
  'leased', redis.call('ZCARD', LEASES),
  'overdue', redis.call('ZCOUNT', LEASES, '-inf', now),
  'ready', redis.call('ZCARD', READY),
  'ready_bytes', counter('queued_bytes'),
  'first_ready', tonumber(redis.call('ZRANGE', READY, 0, 0)[1] or 0),
  'delivered', redis.call('SCARD', DELIVERED),
  'delivered_bytes', delivered_bytes,
  'first_delivered', first_delivered,
  'saved', redis.call('HLEN', SAVED_BYTES),
  'saved_bytes', counter('saved_bytes'),
  'eval_pending', redis.call('ZCARD', EVAL_PENDING),
  'eval_leased', redis.call('ZCARD', EVAL_LEASES),
  'dead', redis.call('XLEN', DEAD),
  'oldest_dead_ms', oldest_dead and tonumber(string.match(oldest_dead[1], '^%d+')) or 0,
}
