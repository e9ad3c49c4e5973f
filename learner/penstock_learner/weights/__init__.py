"""The learner's side of the weight push: gathering, staging, senders, and the publisher that speaks to members."""
