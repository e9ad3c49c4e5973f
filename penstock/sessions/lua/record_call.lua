-- ARGV: session, encoded call, its id, the name of the list of calls that it refers to (empty: to none), seconds to live,
-- largest number of calls and of bytes of a session, largest number of bytes of all sessions, owner, whether it sees all.
-- Adds the call to the session, which belongs to the owner of its first call. Returns recorded, foreign (it belongs to
-- another owner), closed, expired (the calls that it refers to were forgotten), long (the session has too many calls),
-- large (it has too many bytes) or full (all sessions together have).
local session, now, num_bytes, calls, state = ARGV[1], now_ms(), #ARGV[2], calls_key(ARGV[1]), state_key(ARGV[1])
local expired = expired_sessions(now, 16)
if #expired > 0 then
  check('HLEN', state)
  check('LLEN', calls)
  check_forget_calls({session})
  for _, other in ipairs(expired) do forget_calls(other) end
end
local reward, list, owner = unpack(redis.call('HMGET', state, 'reward', 'list', 'owner'))
if not may_use(owner, ARGV[9], ARGV[10]) then return 'foreign' end
if reward then return 'closed' end
local num_calls = redis.call('LLEN', calls)
if ARGV[4] ~= '' and (num_calls == 0 or list ~= ARGV[4]) then return 'expired' end
if num_calls >= tonumber(ARGV[6]) then return 'long' end
if numbers(SESSION_SIZES, session) + num_bytes > tonumber(ARGV[7]) then return 'large' end
if counter('session_bytes') + num_bytes > tonumber(ARGV[8]) then return 'full' end
if num_calls == 0 then redis.call('HSET', state, 'list', ARGV[3]) end
if not owner then redis.call('HSET', state, 'owner', ARGV[9]) end
redis.call('RPUSH', calls, ARGV[2])
redis.call('EXPIRE', calls, ARGV[5])
redis.call('EXPIRE', state, ARGV[5])
redis.call('ZADD', SESSIONS, now + 1000 * ARGV[5], session)
redis.call('HINCRBY', SESSION_SIZES, session, num_bytes)
count('session_bytes', num_bytes)
return 'recorded'
