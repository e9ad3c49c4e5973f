"""The gateway takes prompts and serves policy versions and groups, over REST and gRPC. It owns no state."""
