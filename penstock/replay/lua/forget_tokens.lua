-- ARGV: server, id, attempt. Deletes the saved tokens of a prompt, if the server has leased it.
run_when_full()
check_saved({ARGV[2]})
if redis.call('HGET', OWNERS, ARGV[2]) == ARGV[1] .. '/' .. ARGV[3] then drop_saved(ARGV[2]) end
