-- ARGV: prompt ids. Cancels prompts that the learner has not taken. A held-out prompt belongs to its evaluation and
-- stays. Returns rows of state and attempt after the call, one for each id; an unknown prompt has the state ''.
check_prompts(ARGV, '')
check('HLEN', EVAL_OF)
check('ZCARD', EVAL_LEASES)
redis.call('GETBIT', CANCELLED, 0)
numbers(EXPIRED_REASONS, 'cancelled')
local values = {}
for _, id in ipairs(ARGV) do
  local state, attempt = prompt_state(id)
  local is_taken = state == 'queued' and redis.call('SISMEMBER', DELIVERED, id) == 1
  local is_held_out = redis.call('HEXISTS', EVAL_OF, id) == 1
  if not is_taken and not is_held_out and (state == 'pending' or state == 'leased' or state == 'queued') then
    local payload_key = remove_group(id)
    local was_in_flight = drop_lease(id) + redis.call('SREM', RETURNED, id) > 0
    if payload_key then redis.call('UNLINK', payload_key) end
    redis.call('ZREM', PENDING, id)
    redis.call('ZREM', OPEN, id)
    if payload_key or was_in_flight then
      signal_lease()
      count('expired', 1)
      count('discarded', 1)
      redis.call('HINCRBY', EXPIRED_REASONS, 'cancelled', 1)
    end
    redis.call('SETBIT', CANCELLED, id, 1)
    record_result('cancelled', id, 'cancelled')
    forget_prompts({id})
    state = 'cancelled'
  end
  values[#values + 1] = state or ''
  values[#values + 1] = attempt or 0
end
return rows({'state', 'attempt'}, values)
