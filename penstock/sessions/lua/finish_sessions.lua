-- ARGV: what became a group (session:ID or task:ID), the answer to its rewards, seconds to live, its sessions. Keeps the
-- answer and forgets the calls. The first answer counts: whoever comes later may have found no calls any more. Returns it.
run_when_full()
local answer = ARGV[2]
if #ARGV > 3 then answer = redis.call('HGET', state_key(ARGV[4]), 'answer') or answer end
local task = string.match(ARGV[1], '^task:(.+)$')
local is_complete = task and redis.call('HGET', task_key(task), 'state') == 'complete'
for i = 4, #ARGV do check_abandon(ARGV[i]) end
check('ZCARD', FINISHING)
numbers(COUNTERS, 'tasks_finished')
for i = 4, #ARGV do
  redis.call('HSET', state_key(ARGV[i]), 'answer', answer)
  redis.call('EXPIRE', state_key(ARGV[i]), ARGV[3])
  forget_calls(ARGV[i])
end
if is_complete then
  redis.call('HSET', task_key(task), 'state', 'finished', 'answer', answer)
  redis.call('EXPIRE', task_key(task), ARGV[3])
  count('tasks_finished', 1)
end
redis.call('ZREM', FINISHING, ARGV[1])
return answer
