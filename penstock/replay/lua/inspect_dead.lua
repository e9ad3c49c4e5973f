-- ARGV: first id, last id, how many, 1 for newest first. Returns rows of the dead letters in that range, without their
-- payloads. Changes nothing.
local entries
if ARGV[4] == '1' then
  entries = redis.call('XREVRANGE', DEAD, ARGV[2], ARGV[1], 'COUNT', ARGV[3])
else
  entries = redis.call('XRANGE', DEAD, ARGV[1], ARGV[2], 'COUNT', ARGV[3])
end
local values = {}
for _, entry in ipairs(entries) do
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  table.insert(values, entry[1])
  table.insert(values, tonumber(fields.prompt_id) or 0)
  table.insert(values, fields.reason or '')
  table.insert(values, #(fields.prompt or ''))
  table.insert(values, #(fields.group or ''))
end
return rows({'stream_id', 'prompt_id', 'reason', 'prompt_bytes', 'group_bytes'}, values)
