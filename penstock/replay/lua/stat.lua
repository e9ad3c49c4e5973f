-- One consistent look. The order is that of QueueStat's fields.
return {
  redis.call('ZCARD', PENDING), counter('admitted'), in_flight(), queued(), redis.call('SCARD', DELIVERED),
  counter('queued_bytes'), counter('trained'), counter('expired'), counter('dead_lettered'), counter('redelivered'),
  counter('reclaimed'), counter('discarded'), counter('inserted'), counter('step'), counter('policy_version'),
  counter('term'),
}
