-- ARGV: prompt ids. Returns the payload key of each, or false for a prompt without a queued group.
local keys = {}
for i, id in ipairs(ARGV) do
  local attempt = group_meta(id)
  keys[i] = attempt and group_key(id, attempt) or false
end
return keys
