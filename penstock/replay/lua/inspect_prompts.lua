-- ARGV: prompt ids. Returns the encoded prompt of each, or '' if it is gone. Changes nothing.
local payloads = {}
for i, id in ipairs(ARGV) do payloads[i] = redis.call('HGET', PROMPTS, id) or '' end
return payloads
