-- ARGV: part of the run, phase, whether it is the first one of a process (1), largest number of phases. Appends the
-- phase to those of the part. Entering the newest one again changes nothing.
run_when_full()
local text = ARGV[3] == '0' and redis.call('HGET', PHASES, ARGV[1])
local phases = text and cjson.decode(text) or {}
local newest = phases[#phases]
if newest and newest[1] == ARGV[2] then return 0 end
phases[#phases + 1] = {ARGV[2], now_ms()}
while #phases > tonumber(ARGV[4]) do table.remove(phases, 1) end
redis.call('HSET', PHASES, ARGV[1], cjson.encode(phases))
return 1
