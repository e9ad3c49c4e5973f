-- ARGV: prompt ids. Returns the payload key of each, or false for a prompt without a queued group.
local keys = {}
for i, id in ipairs(ARGV) do
  local meta = group_meta(id)
  keys[i] = meta and group_key(id, meta.attempt) or false
end
return keys
