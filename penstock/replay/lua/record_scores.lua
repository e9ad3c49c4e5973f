-- ARGV: number, then name and value of each score. Keeps each as the newest one of its name, and in its history.
check('HLEN', SCORES, SCORE_HISTORY)
for i = 2, #ARGV, 2 do
  keep_score(ARGV[i], ARGV[i] .. '-' .. ARGV[1], ARGV[i + 1])
end
return 1
