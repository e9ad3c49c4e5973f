"""Stand-ins for the parts of a soak, with which its smoke run kills, starts again, checks and counts within seconds.

Redis is the real one. The learner only prints the lines of a learner's log, the cluster only listens and has a process
with the name of a rank, and the others sleep.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock_tools.local.private_redis import find_redis_server
from soak_parts.processes import Part

SLEEP = ("sleep", "600")
LEARNER = """
step=$(cat "$0" 2> /dev/null || echo 2)
step=$((step - 2))  # as after a checkpoint of that step
echo " INFO starting or joining Ray"
echo " INFO Ray is ready"
echo " INFO the roles are ready"
echo " INFO training from step $step"
while true; do
  step=$((step + 1))
  echo $step > "$0"
  echo " INFO step $step version $step reward 0.5 0.1s"
  sleep 0.1
done
"""
CLUSTER = """
(exec -a ray::PolicyWorker sleep 600) &
exec "$1" --port "${0#--port=}" --save ""
"""


def use_stand_ins(parts: Mapping[str, Part], ray_port: int, folder: Path) -> None:
    """Replace the commands of all parts but Redis."""
    commands = {
        "redis": parts["redis"].command,
        "ray": ("bash", "-c", CLUSTER, f"--port={ray_port}", find_redis_server()),
        "learner": ("bash", "-c", LEARNER, str(folder / "step")),
    }
    for name, part in parts.items():
        part.command = commands.get(name, SLEEP)
