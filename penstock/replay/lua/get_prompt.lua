-- ARGV: prompt id. Returns state, attempt and payload; nothing for an unknown prompt.
local state, attempt, payload = prompt_state(ARGV[1])
return state and {'state', state, 'attempt', attempt, 'payload', payload} or {}
