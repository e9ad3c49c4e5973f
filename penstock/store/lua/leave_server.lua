-- ARGV: server. Forgets it, with its breaker and its quarantine.
forget_server(ARGV[1])
