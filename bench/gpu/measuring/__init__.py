"""How every GPU benchmark measures: its parts and their results, child processes, and the use of the GPU."""
