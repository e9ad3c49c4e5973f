-- ARGV: server. Forgets it, with its breaker and its quarantine.
check_forget_server()
forget_server(ARGV[1])
