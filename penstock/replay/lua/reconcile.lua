-- ARGV: prompt id and attempt of each group in a producer's outbox. Returns the ids that are done, which the producer
-- can forget, and the ids that are missing, which Redis lost with its tail and the producer appends again.
local done, missing = {}, {}
for i = 1, #ARGV, 2 do
  local id = ARGV[i]
  local is_done = redis.call('GETBIT', TRAINED, id) == 1 or redis.call('HEXISTS', PROMPTS, id) == 0
  if not is_done and not group_meta(id) then
    local superseded = tonumber(redis.call('HGET', ATTEMPTS, id) or '0') > tonumber(ARGV[i + 1])
    if superseded then is_done = true else table.insert(missing, tonumber(id)) end
  end
  if is_done then table.insert(done, tonumber(id)) end
end
return {'done', done, 'missing', missing}
