-- ARGV: term, step of the checkpoint, groups that were trained until then, groups per step. Sets the step, and the base
-- of the admission: how many groups more were trained than so many steps of this size have, or will be when later steps
-- have trained their manifests. Returns the hash of manifests: {step, 'id id ...', ...}.
local fenced = check_term(ARGV[1])
if fenced then return fenced end
local manifests, per_step, redelivered = redis.call('HGETALL', MANIFESTS), tonumber(ARGV[4]), numbers(COUNTERS, 'redelivered')
local base = tonumber(ARGV[3]) - tonumber(ARGV[2]) * per_step
for i = 1, #manifests, 2 do
  if tonumber(manifests[i]) > tonumber(ARGV[2]) then
    local num_groups = 0
    for id in string.gmatch(manifests[i + 1], '%d+') do
      redelivered = redelivered + redis.call('HEXISTS', META, id)
      num_groups = num_groups + 1
    end
    base = base + math.max(0, num_groups - per_step)
  end
end
check_stream(LEASE_SIGNALS)
redis.call('HSET', COUNTERS, 'step', ARGV[2], 'admission_base', base, 'redelivered', redelivered)
signal_lease()
return manifests
