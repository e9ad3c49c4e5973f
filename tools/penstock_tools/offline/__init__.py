"""`penstock generate` and `penstock evaluate`, which need neither Redis nor a learner. See docs/offline.md."""
