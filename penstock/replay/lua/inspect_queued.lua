-- ARGV: selection, maximum number of ready groups to list (-1: all), 1 to list delivered groups first. Moves nothing.
-- Returns prompt ids: delivered groups in the order of their batches, then ready groups in the order of take.
local ids, last = {}, tonumber(ARGV[2])
if last > 0 then last = last - 1 end
if ARGV[3] == '1' then
  local manifests, steps = {}, {}
  local flat = redis.call('HGETALL', MANIFESTS)
  for i = 1, #flat, 2 do
    manifests[tonumber(flat[i])] = flat[i + 1]
    table.insert(steps, tonumber(flat[i]))
  end
  table.sort(steps)
  for _, step in ipairs(steps) do
    for id in string.gmatch(manifests[step], '%d+') do
      if redis.call('SISMEMBER', DELIVERED, id) == 1 then table.insert(ids, tonumber(id)) end
    end
  end
end
local ready
if ARGV[1] == 'freshest' then
  complete_ready_by_version()
  ready = redis.call('ZREVRANGE', READY_BY_VERSION, 0, last)
else
  ready = redis.call('ZRANGE', READY, 0, last)
end
for _, id in ipairs(ready) do table.insert(ids, tonumber(id)) end
return ids
