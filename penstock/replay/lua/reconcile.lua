-- ARGV: prompt id and attempt of each group in a producer's outbox. Returns {settled ids, missing ids}: settled need no
-- producer any more; missing were lost with Redis' tail and are to be appended again.
local settled, missing = {}, {}
for i = 1, #ARGV, 2 do
  local id = ARGV[i]
  local gone = redis.call('GETBIT', TRAINED, id) == 1 or redis.call('HEXISTS', PROMPTS, id) == 0
  if not gone and not group_meta(id) then
    local superseded = tonumber(redis.call('HGET', ATTEMPTS, id) or '0') > tonumber(ARGV[i + 1])
    if superseded then gone = true else table.insert(missing, tonumber(id)) end
  end
  if gone then table.insert(settled, tonumber(id)) end
end
return {settled, missing}
