-- ARGV: term, step, prompt ids. One atomic acknowledgement of what a durable checkpoint covers.
local fenced = check_term(ARGV[1])
if fenced then return fenced end
local found = 0
for i = 3, #ARGV do
  local id = ARGV[i]
  if redis.call('HEXISTS', PROMPTS, id) == 1 then
    local payload_key = remove_group(id)
    if payload_key then redis.call('UNLINK', payload_key) else settle_admission(id) end
    forget_prompt(id)
    count('trained', 1)
    found = found + 1
  end
  redis.call('SETBIT', TRAINED, id, 1)
end
-- What a manifest of these steps still holds was neither trained nor dropped: a reply of take was lost, or Redis lost
-- its tail. It is ready again.
for _, step in ipairs(redis.call('HKEYS', MANIFESTS)) do
  if tonumber(step) <= tonumber(ARGV[2]) then
    for id in string.gmatch(redis.call('HGET', MANIFESTS, step), '%d+') do
      if redis.call('SREM', DELIVERED, id) == 1 then
        local _, bytes, admission, version = group_meta(id)
        make_ready(id, bytes, admission, version)
      end
    end
    redis.call('HDEL', MANIFESTS, step)
  end
end
redis.call('HSET', COUNTERS, 'committed_step', math.max(counter('committed_step'), tonumber(ARGV[2])))
return found
