"""Role workers: the Ray actors that hold model shards. One class a role, one actor a rank."""
