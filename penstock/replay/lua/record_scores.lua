-- ARGV: number, how many scores, then name and value of each score and each detail. Keeps each as the newest one of its
-- name, and in its history.
check('HLEN', SCORES, SCORE_HISTORY)
for i = 3, #ARGV, 2 do
  keep_score(ARGV[i], ARGV[i] .. '-' .. ARGV[1], ARGV[i + 1], i >= 3 + 2 * ARGV[2])
end
return 1
