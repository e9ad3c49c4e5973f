-- KEYS[1] is the prefix of the created runs' registry. ARGV: run, the record that the caller read (empty: none), the
-- new record. Returns 1 if the record was still the one that was read, and is now the new one.
local CREATED = PREFIX .. 'created'
if redis.call('HGET', CREATED, ARGV[1]) ~= (ARGV[2] ~= '' and ARGV[2]) then
  return 0
end
redis.call('HSET', CREATED, ARGV[1], ARGV[3])
return 1
