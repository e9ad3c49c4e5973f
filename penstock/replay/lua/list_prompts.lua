-- ARGV: id to start after, maximum number of prompts, state (empty: any), maximum number of ids to look at.
-- Returns the id that was looked at last, 1 if more ids follow, and rows of the prompts.
local newest, id, left = counter('next_prompt_id'), tonumber(ARGV[1]), tonumber(ARGV[2])
local last = math.min(newest, id + tonumber(ARGV[4]))
local values = {}
while id < last and left > 0 do
  id = id + 1
  local state, attempt, payload = prompt_state(id)
  if state and (ARGV[3] == '' or ARGV[3] == state) then
    for _, part in ipairs({id, state, attempt, payload}) do values[#values + 1] = part end
    left = left - 1
  end
end
return {
  'last_id', id,
  'has_more', id < newest and 1 or 0,
  'prompts', rows({'prompt_id', 'state', 'attempt', 'payload'}, values),
}
