-- ARGV: term, step of the checkpoint. Sets the step and returns the hash of manifests: {step, 'id id ...', ...}.
local fenced = check_term(ARGV[1])
if fenced then return fenced end
local manifests, redelivered = redis.call('HGETALL', MANIFESTS), numbers(COUNTERS, 'redelivered')
for i = 1, #manifests, 2 do
  if tonumber(manifests[i]) > tonumber(ARGV[2]) then
    for id in string.gmatch(manifests[i + 1], '%d+') do redelivered = redelivered + redis.call('HEXISTS', META, id) end
  end
end
check_stream(LEASE_SIGNALS)
redis.call('HSET', COUNTERS, 'step', ARGV[2], 'redelivered', redelivered)
signal_lease()
return manifests
