"""The task of whole_run.py, and its contenders: ours, TRL and verl."""
