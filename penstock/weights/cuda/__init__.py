"""What the CUDA transports share: streams, memory, checksums, NCCL groups and IPC. CuPy, imported late; no torch."""
