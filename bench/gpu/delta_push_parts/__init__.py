"""The member of delta_push.py, and the optimizer steps between its pushes."""
