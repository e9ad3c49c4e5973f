"""Code shared by the CUDA transports: streams, memory, checksums, NCCL groups, IPC. Imports CuPy late, and no torch."""
