"""`penstock doctor`: checks of a deployment, each with advice on what to do.

| module | examines |
|---|---|
| `redis.py` | version, durability, memory and clock of Redis |
| `run.py` | what the run stored in Redis: conservation, heartbeats, weights, log-probs |
| `stopped.py` | what the next start of a stopped run needs |
| `machine.py` | ports, disk and GPUs of this machine |

The checks only read. They use the rights of the config's Redis user: what that user may not read becomes a warning.
"""

from penstock.doctor.examination import examine
from penstock.doctor.finding import Finding

__all__ = ["Finding", "examine"]
