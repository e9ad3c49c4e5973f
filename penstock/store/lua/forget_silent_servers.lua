-- ARGV: the learner's term, longest silence in ms. Forgets the servers that have sent no heartbeat for longer, with their
-- breakers and quarantines. Returns rows of these servers.
local fenced = check_term(ARGV[1])
if fenced then return fenced end
local records, now, values = redis.call('HGETALL', SERVERS), now_ms(), {}
for i = 1, #records, 2 do
  local silence_ms = now - tonumber(cjson.decode(records[i + 1]).heartbeat_ms)
  if silence_ms > tonumber(ARGV[2]) then values[#values + 1], values[#values + 2] = records[i], silence_ms end
end
check_forget_server()
for i = 1, #values, 2 do forget_server(values[i]) end
return {{'server_id', 'silence_ms'}, values}
