"""The machine that a process runs on: its disks, memory, GPUs, ports and files."""
