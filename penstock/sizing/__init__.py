"""What a run needs: memory, rates and GPUs by arithmetic; idle time and staleness by simulation."""
