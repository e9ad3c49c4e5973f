-- Returns a record of the counts of places, by what became of them.
return {
  'submitted', counter('task_places_submitted'), 'pending', redis.call('ZCARD', TASK_PENDING), 'leased',
  redis.call('ZCARD', TASK_LEASES), 'rewarded', counter('task_places_rewarded'), 'failed', counter('task_places_failed'),
  'dropped', counter('task_places_dropped'), 'reclaimed', counter('task_places_reclaimed'), 'open_tasks',
  redis.call('SCARD', TASK_OPEN), 'failed_tasks', counter('tasks_failed'), 'finished_tasks', counter('tasks_finished'),
  'sessions', redis.call('ZCARD', SESSIONS), 'session_bytes', counter('session_bytes'),
}
