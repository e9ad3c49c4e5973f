"""TRL's run of the demo's task for trl_demo.py, and the reward of both contenders."""
