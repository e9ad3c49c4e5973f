-- ARGV: session, the name of its list of calls and the number of calls that the caller knows, lease ms, owner, whether it
-- sees all. Returns whether it is open (0), has its reward (1), is abandoned (2) or belongs to another owner (3), the name of
-- its list, and its other calls. A session that expired and began again has a list of another name, of which all calls are
-- returned. A call renews the lease of a session that was leased with a task.
local session = ARGV[1]
local fields = redis.call('HMGET', state_key(session), 'reward', 'list', 'abandoned', 'owner')
local reward, list, abandoned, owner = unpack(fields)
if not may_use(owner, ARGV[5], ARGV[6]) then return {3, '', {}} end
local first = list == ARGV[2] and ARGV[3] or 0
local calls, task, place = redis.call('LRANGE', calls_key(session), first, -1), leased_place_of(session)
if task then redis.call('ZADD', TASK_LEASES, now_ms() + ARGV[4], member(task, place)) end
return {abandoned and 2 or reward and 1 or 0, list or '', calls}
