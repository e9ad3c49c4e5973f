-- ARGV: prompt id. Returns {state, attempt, payload}; an unknown prompt has no state.
local state, attempt, payload = prompt_state(ARGV[1])
return state and {state, attempt, payload} or {}
