"""Generation without a run: prompts from a file, answers into a file, no Redis and no learner. See docs/offline.md."""
