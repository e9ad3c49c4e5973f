-- ARGV: session, failure (empty: none), largest number of failures of a place, seconds to live, retry ms, owner, whether it
-- sees all. Gives the place of a session back, and abandons the session. Returns 1 if the owner's session held its lease.
run_when_full()
local now = now_ms()
if not may_use_session(ARGV[1], ARGV[6], ARGV[7]) then return 0 end
local task, place = leased_place_of(ARGV[1])
if not task then return 0 end
check_abandon(ARGV[1])
numbers(task_key(task), 'failures:' .. place)
check_task(task, ARGV[2] == '' and 0 or 1)
abandon(ARGV[1], ARGV[4])
return_place(task, place, ARGV[2], ARGV[3], now, ARGV[4], ARGV[5])
return 1
