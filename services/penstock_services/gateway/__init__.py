"""The gateway: prompts in, policy versions and groups out, over REST and gRPC. Owns no state."""
