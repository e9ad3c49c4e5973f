-- ARGV: feed, fingerprint, position, prompts of an epoch, who owns it if no one does yet (empty: no one), then payload and
-- priority of each prompt. If the feed stands at this position and has this fingerprint, adds the prompts and moves the
-- position on in one step; otherwise adds nothing.
-- Stores the number of prompts of an epoch, unless it is 0 or the fingerprint is another one.
-- Returns position, fingerprint, prompts of an epoch and owner of the feed after the call.
local name, position, epoch_prompts = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4])
numbers(COUNTERS, 'next_prompt_id')
local stored = numbers(FEEDS, name, name .. ':prompts')
local fingerprint = redis.call('HGET', FEEDS, name .. ':fingerprint') or ARGV[2]
if fingerprint == ARGV[2] then
  if #ARGV > 5 and stored == position then
    local places = {}
    local num_pending, num_submitted = check_intake()
    for place = 6, #ARGV, 2 do places[#places + 1] = place end
    add_prompts(places, num_pending, num_submitted)
    stored = position + #places
  end
  if stored > 0 or epoch_prompts > 0 then
    redis.call('HSET', FEEDS, name, stored, name .. ':fingerprint', fingerprint)
  end
  if epoch_prompts > 0 then redis.call('HSET', FEEDS, name .. ':prompts', epoch_prompts) end
end
epoch_prompts = tonumber(redis.call('HGET', FEEDS, name .. ':prompts') or '0')
local owner = redis.call('HGET', FEEDS, name .. ':owner') or ''
if owner == '' and ARGV[5] ~= '' then
  owner = ARGV[5]
  redis.call('HSET', FEEDS, name .. ':owner', owner)
end
return {
  'position', stored, 'fingerprint', fingerprint, 'epoch_prompts', epoch_prompts, 'last_id', counter('next_prompt_id'),
  'owner', owner,
}
