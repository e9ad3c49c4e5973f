"""The processes of soak.py, who kills them, and the steps that the learner's log shows."""
